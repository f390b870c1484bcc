"""Predict whether a run fits into memory before anything is loaded.

Counted, in bytes on one device:

1. ``weights``: every parameter as stored, quantized or not, and the adapter (:mod:`.weights`); a
   reference's weights (:mod:`.stage`).
2. ``optimizers``: states of trained parameters, and the working memory of an update.
3. ``profile``: activations. A short model of the same layers runs forward and backward on fake
   tensors, and :mod:`.borders` counts the storages alive between its layers: what each layer keeps
   for its backward, its peak while it runs, and the same for head and loss.
4. ``plan``: combines 1 to 3 at each moment of a step (each layer's forward and backward, head,
   strength measurement, reference, generation, update); the largest sum is the prediction.
5. ``verdict`` compares it with a GPU's memory, less 6 % for CUDA's context and fragmentation, and
   ``remedies`` searches for changes that make it fit.

Not counted: what a kernel allocates inside, buffers of NCCL and FSDP2 beyond the opened layer, and
fragmentation.
"""
