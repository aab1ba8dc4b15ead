"""The benchmark: fxbraid beside torch.distributed.pipelining, on one model, checked against one process."""
