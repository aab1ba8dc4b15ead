"""The benchmark: fxbraid beside torch.distributed.pipelining, on the same model, checked against one process."""
