"""``moe-finetune chat``: ask a model before and after training, side by side.

Shape legend: T tokens, K selected experts.
"""

import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from moe_finetune.checkpoint.loading import forget_generation_defaults, load_model
from moe_finetune.data.tokenize import rendered
from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.io.run_folder import checkpoint_in, recipe_of_run
from moe_finetune.io.terminal import terminal
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.losses.record import RoutingRecord
from moe_finetune.models.loading import load_tokenizer, local_folder
from moe_finetune.moe.hooks import Recorder

HELP = "/experts: experts of the last token   /reset: start over   /exit: end"


@dataclass
class Speaker:
    """One model and its conversation.

    Attributes:
        model: a causal language model in eval mode.
        turns: the conversation as chat messages; unused without a chat template.
        ids: tokens of the last prompt and reply.
    """

    name: str
    model: Any
    tokenizer: Any
    turns: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def reply(self, prompt_text: str, most: int) -> str:
        """Continue the conversation greedily by up to ``most`` tokens.

        Without a chat template, each text is continued independently.
        """
        self.turns.append({"role": "user", "content": prompt_text})
        if self.tokenizer.chat_template:
            text, _ = rendered({"messages": self.turns}, self.tokenizer, prompt=True, checked=False)
            prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            prompt = self.tokenizer(prompt_text)["input_ids"]
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and len(prompt) + most > limit:
            raise DataError(
                f"{self.name}: {len(prompt)} tokens and a reply of {most} exceed its context of "
                f"{limit}; type /reset, or lower --max-tokens"
            )
        ids = torch.tensor([prompt], device=self.model.device)
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=most,
            )
        self.ids = out[0].tolist()
        words = self.tokenizer.decode(self.ids[len(prompt) :], skip_special_tokens=True)
        self.turns.append({"role": "assistant", "content": words})
        return words

    def reset(self) -> None:
        self.turns, self.ids = [], []

    def last_experts(self) -> list[tuple[int, list[tuple[int, float]]]]:
        """MoE layer -> experts of the last token with their weights, heaviest first."""
        by_layer: list[tuple[int, list[tuple[int, float]]]] = []

        def keep(record: RoutingRecord, _: object) -> None:
            experts_K, weights_K = record.index_TK[-1], record.weights_TK[-1]
            pairs = zip(experts_K.tolist(), weights_K.tolist(), strict=True)
            by_layer.append((record.layer, sorted(pairs, key=lambda pair: -pair[1])))

        ids = torch.tensor([self.ids], device=self.model.device)
        with torch.no_grad(), Recorder(self.model, observers=[keep], observe="all"):
            self.model(input_ids=ids, use_cache=False)
        return by_layer


def open_speakers(source: str, base: str | None = None, dtype: str = "auto") -> list[Speaker]:
    """The models to chat with: a run's base and merged checkpoint, or the given checkpoint.

    Args:
        source: a run's folder, a checkpoint's, or a hub id.
        base: another checkpoint to compare with; default: the recipe's, for a run.

    Raises:
        CheckpointError: an adapter or a run that was not merged, or a folder without a checkpoint.
    """
    trained = checkpoint_in(source)
    recipe = recipe_of_run(source) if Path(source).is_dir() and trained != source else None
    if base is None and recipe is not None:
        match read_yaml(recipe, CheckpointError):
            case {"model": {"path": str(base)}}:
                pass
            case _:
                raise CheckpointError(f"{recipe}: has no model.path; give the base with --base")
    named = [("base", base)] if base is not None else []
    named.append(("merged" if base is not None else "model", str(trained)))
    return [_speaker(name, path, dtype) for name, path in named]


def _speaker(name: str, path: str, dtype: str) -> Speaker:
    folder = local_folder(path)
    device = "cuda" if torch.cuda.is_available() else None
    disable_progress_bar()
    with terminal().phase(f"load {name}"):
        model, tokenizer = (
            load_model(folder, dtype=dtype, device_map=device),
            load_tokenizer(folder),
        )
    forget_generation_defaults(model, tokenizer.pad_token_id)
    return Speaker(name, model, tokenizer)


def talk(
    speakers: Sequence[Speaker], prompts: Iterable[str], most: int = 128, experts: bool = False
) -> None:
    """Answer each text with every model, on standard output.

    Args:
        prompts: texts, or the commands of ``HELP``.
        experts: show the experts of each reply's last token.
    """
    console = Console(highlight=False)
    for text in prompts:
        if text.strip() == "/exit":
            return
        if text.strip() == "/reset":
            for speaker in speakers:
                speaker.reset()
        elif text.strip() == "/experts":
            console.print(experts_table(speakers), markup=False)
        elif text.startswith("/"):
            console.print(HELP, markup=False)
        elif text.strip():
            replies = {speaker.name: visible(speaker.reply(text, most)) for speaker in speakers}
            console.print(beside(replies, sys.stdout.isatty()))
            if experts:
                console.print(experts_table(speakers))


def visible(text: str) -> str:
    """``text`` without control characters, which could change the terminal."""
    return "".join(
        letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc"
    )


def beside(replies: dict[str, str], columns: bool) -> Any:
    """Replies by name: in columns on a terminal, otherwise as lines."""
    if not columns:
        return Text("\n".join(f"{name}: {reply.strip()}" for name, reply in replies.items()))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    for name in replies:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(Text(reply.strip()) for reply in replies.values()))
    return table


def experts_table(speakers: Sequence[Speaker]) -> Any:
    """Experts of each model's last token, one row per layer: ``expert (weight)``."""
    if not all(speaker.ids for speaker in speakers):
        return Text("no message yet; ask something first")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("layer", justify="right")
    by_speaker = []
    for speaker in speakers:
        token = speaker.tokenizer.decode([speaker.ids[-1]])
        table.add_column(Text(f"{speaker.name}: {token!r}"))  # a token may look like markup
        by_speaker.append(speaker.last_experts())
    for rows in zip(*by_speaker, strict=True):
        cells = ["  ".join(f"{expert} ({weight:.2f})" for expert, weight in row) for _, row in rows]
        table.add_row(str(rows[0][0]), *cells)
    return table


def typed() -> Iterator[str]:
    """Lines of standard input, with a prompt on a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    print(HELP)
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
