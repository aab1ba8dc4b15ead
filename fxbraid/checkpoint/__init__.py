"""Checkpoints: ``Checkpointer`` saves and resumes on any layout, ``export`` writes Hugging Face files.

    codec       values that are no tensors <-> JSON that holds nothing else
    files       safetensors as a stream, with its hash; files that are there whole or not at all
    folder      names, manifest, ``latest``: what is on disk, and whether it is what was written (no torch)
    held        which boxes of which full tensors a rank holds, and which of them it writes
    state       optimizer and random numbers as tensors by name and JSON
    storage     the two ends of torch.distributed.checkpoint: planners, writer, reader
    checkpointer  the public class: when, in what order, what all ranks agree on
    export      plain Hugging Face folders, from a braided model or from a checkpoint
    cli         ``fxbraid checkpoint show | verify | convert``

Nothing here reads or writes a pickle.
"""
