"""What the toolkit asks of a tokenizer, whichever class of transformers or of a host it is."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of transformers' ``PreTrainedTokenizerBase`` that is used here.

    A processor of a multimodal model is not one; its ``tokenizer`` is. Token ids are integers.
    """

    chat_template: Any
    eos_token: Any
    pad_token: Any
    eos_token_id: Any
    bos_token_id: Any
    pad_token_id: Any
    split_special_tokens: Any

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    @property
    def all_special_tokens(self) -> Sequence[Any]: ...

    @property
    def backend_tokenizer(self) -> Any: ...

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any: ...

    def encode(self, *args: Any, **options: Any) -> Any: ...

    def decode(self, *args: Any, **options: Any) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_chat_template(self, *args: Any, **options: Any) -> str: ...

    def apply_chat_template(self, *args: Any, **options: Any) -> Any: ...

    def convert_ids_to_tokens(self, *args: Any, **options: Any) -> Any: ...

    def convert_tokens_to_ids(self, *args: Any, **options: Any) -> Any: ...

    def num_special_tokens_to_add(self, *args: Any, **options: Any) -> int: ...

    def save_pretrained(self, *args: Any, **options: Any) -> Any: ...
