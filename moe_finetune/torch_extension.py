"""torch's extension points, whose documented paths are underscored; it has no others for them."""

from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "TorchDispatchMode",
    "is_fake",
    "tree_leaves",
    "tree_map",
]
