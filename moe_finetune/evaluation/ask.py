"""One answer from a model in transformers, streamed: of a run, a checkpoint or an adapter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import TextStreamer

from moe_finetune.checkpoint.adapters.files import CONFIG
from moe_finetune.checkpoint.adapters.in_peft import with_adapter
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.load_model import forget_generation_defaults, load_model
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.tokenizer_files import has_tokenizer, reply_ends
from moe_finetune.errors import DataError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.models.config_and_tokenizer import load_tokenizer, local_folder
from moe_finetune.models.tokenizer import Tokenizer
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.routing.tracing_checkpoint import stored_bias


@dataclass(frozen=True)
class Source:
    """What is asked: a checkpoint, or ``adapter`` over the checkpoint that is its base."""

    checkpoint: Path
    adapter: Path | None = None

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer that the model was trained with."""
        own = self.adapter is not None and has_tokenizer(self.adapter)
        return self.adapter if own and self.adapter is not None else self.checkpoint


def source_of(path: str, base_of: Callable[[Path], Path]) -> Source:
    """A run's merged checkpoint, else its adapter over the base; an adapter; or a checkpoint.

    ``base_of``: the base's folder for an adapter's.
    """
    run = RunFolder(path)
    if (run.merged / "config.json").is_file():
        return Source(run.merged)
    for adapter in (run.adapter, run.path):
        if (adapter / CONFIG).is_file() and not (adapter / "config.json").is_file():
            return Source(base_of(adapter), adapter)
    return Source(local_folder(path))


class _Stream(TextStreamer):
    """Hands on text as soon as a word is whole."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None]):
        super().__init__(cast(Any, tokenizer), skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def prompt_of(tokenizer: Tokenizer, question: str, system: str | None, raw: bool) -> list[int]:
    """The token ids of a question: through the chat template, or with ``raw`` as it stands."""
    if not question.strip():
        raise DataError("the question is empty; give a text, such as 'What is a router?'")
    if raw:
        if system is not None:
            raise DataError("--system: is a turn of a chat; leave --raw out")
        return list(tokenizer(question)["input_ids"])
    if not tokenizer.chat_template:
        raise DataError("this model has no chat template; --raw gives it the text as it stands")
    turns = [] if system is None else [{"role": "system", "content": system}]
    turns.append({"role": "user", "content": question})
    try:
        chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # a template may raise anything
        raise DataError(f"the chat template refuses the question ({error})") from None
    return list(chat["input_ids"])


def ask(
    source: Source,
    question: str,
    write: Callable[[str], None],
    *,
    system: str | None = None,
    raw: bool = False,
    max_tokens: int = 512,
    temperature: float = 0.0,
) -> bool:
    """Generate an answer and hand its text to ``write`` as it comes; greedy at temperature 0.

    Penalties of the checkpoint's generation config are not used. Returns whether the answer ended
    by itself within ``max_tokens``.
    """
    tokenizer = load_tokenizer(source.tokenizer)
    ids = torch.tensor([prompt_of(tokenizer, question, system, raw)])
    opened = open_checkpoint(source.checkpoint, values=True, stored=True)
    model: Any = load_model(opened, device_map="cuda" if torch.cuda.is_available() else None)
    with ExitStack() as stack:
        if source.adapter is not None:
            model = with_adapter(model, open_adapter(source.adapter, opened))
            if (bias := stored_bias(model, source.adapter)) is not None:
                stack.enter_context(Recorder(model, perturbation=bias))
        ends = reply_ends(tokenizer, model.generation_config.eos_token_id)
        forget_generation_defaults(model, tokenizer.pad_token_id)
        ids = ids.to(model.device)
        sampling = {"do_sample": temperature > 0}
        with torch.no_grad():
            tokens = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                eos_token_id=ends or None,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
                streamer=_Stream(tokenizer, write),
                **(sampling | {"temperature": temperature} if temperature > 0 else sampling),
            )
    return int(tokens[0, -1]) in ends
