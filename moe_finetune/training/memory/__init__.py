"""Whether a run fits into memory, predicted before anything is loaded.

What is counted, in bytes of one device:

1. ``weights``: every parameter as stored there, quantized or not, and what the adapter adds
   (:mod:`.weights`); a reference's or teacher's weights (:mod:`.stage`).
2. ``optimizers``: states of what trains, and the working memory of an update.
3. ``profile``: activations. A short model of the same layers runs forward and backward on fake
   tensors, and :mod:`.borders` counts the storages alive between its layers: what each layer keeps
   for its backward, the most that it needs on the way, and the same of head and loss.
4. ``plan``: the moments of a step (each layer's forward and backward, head, measured strength,
   reference, generation, update) from 1 to 3; the largest sum is the prediction.
5. ``verdict`` compares it with a GPU, less 6 % for CUDA's context and gaps, and ``remedies`` tries
   what would make it fit.

Not counted: what a kernel allocates inside, buffers of NCCL and FSDP2 beyond the opened layer, and
fragmentation.
"""
