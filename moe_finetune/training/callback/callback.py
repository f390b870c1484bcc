"""The specialization losses inside any transformers or TRL trainer.

    trainer = SFTTrainer(..., callbacks=[SpecializationCallback("orthogonal_variance")])

With ``output="runs/mine"`` it also writes a run folder, which ``report``, ``compare``
and ``merge`` read.

The callback installs the method on the trainer's model when training begins and removes it when
training ends. ``attach(trainer)`` is optional: with it, the callback reads the accumulation window
from the trainer (exact with unsized data and on a resume inside an epoch), and every other logger
sees its values.

Running tables and a loss-free bias follow the weights. They are saved in every checkpoint (in
``trainer_state.json``, where a resume finds them), restored with the best model, and kept for a
second ``train()``. After training the bias stays on the model, for evaluation and saving, until
``close()``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from weakref import WeakKeyDictionary, ref

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from moe_finetune.checkpoint.adapters.config import no_merge_because
from moe_finetune.errors import CheckpointError, ObjectiveError, RecipeError
from moe_finetune.io.json_file import read_object
from moe_finetune.io.versions import warn_of_untested
from moe_finetune.moe.experts.grouped_products import Kernel
from moe_finetune.moe.layers import backbone_of
from moe_finetune.moe.recorder.hooks import Recorder
from moe_finetune.recipe.method import Method, resolve_method
from moe_finetune.training import ranks
from moe_finetune.training.callback.accumulation_window import AccumulationWindow
from moe_finetune.training.callback.early_ends import CollapseWatch
from moe_finetune.training.callback.host_run_folder import HostRun
from moe_finetune.training.measures.routing_samples import evaluation_metrics, evaluation_sample
from moe_finetune.training.refuse_launch import (
    OWN_BALANCE_LOSS,
    check_arguments,
    check_equal_steps,
)
from moe_finetune.training.save_and_resume.save_trained import describe_adapter
from moe_finetune.training.save_and_resume.sharded_state import check_all_sharded
from moe_finetune.training.save_and_resume.state_files import TRAINER_FILE, from_text, to_text
from moe_finetune.training.specialization import Specialization, on_model

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)
OPTIONS = ("output", "dropout", "kernel")
ORDER = (
    "SpecializationCallback",  # puts the method's values into the log entry that all others read
    "RunLog",  # writes the entry
    "LiveTable",  # shows what was written
    "",  # the trainer's own callbacks and reporters
    "KeepSteps",  # keeps the model that the step's other callbacks left
    "StopOnSignal",  # may end the run, so it comes last
)
"""The order of a trainer's callbacks, which matters in each event."""


_LAST_GIVEN: WeakKeyDictionary[Any, ref[SpecializationCallback]] = WeakKeyDictionary()
"""The callback that each trainer's model was given last, for an object that replaces it.

Of the module and not of a run: the replacing object is made by transformers from :meth:`state`
alone, which is JSON, and the trainer has dropped the replaced one by then. The model is what both
are handed. Keys and values are weak, so an ended run leaves nothing.
"""


def add_callbacks(trainer: Any, *callbacks: TrainerCallback) -> None:
    """Add ``callbacks`` to ``trainer`` in the order above; other callbacks keep their order."""
    listed = trainer.callback_handler.callbacks
    listed += [callback for callback in callbacks if callback not in listed]
    listed.sort(key=_position)


def _position(callback: TrainerCallback) -> int:
    names = [kind.__name__ for kind in type(callback).__mro__]
    return next((ORDER.index(name) for name in names if name in ORDER), ORDER.index(""))


class SpecializationCallback(TrainerCallback, ExportableState):
    """Adds a method's losses and routing metrics to a trainer.

    Args:
        method: the name of a preset, or a mapping as under ``method:`` in a recipe.
        output: a new or empty folder for the run's log, its routing (before training, after it and
            at evaluations), its method and the adapter. Call ``attach(trainer)`` to measure routing
            on the trainer's evaluation data instead of its training data.
        dropout: LoRA dropout inside the routed and shared experts (PEFT has none there).
        kernel: how the experts' matrix products run: "auto", "grouped" or "loop".
        **overrides: keys of ``method:`` that override the preset's.

    Attributes:
        specialization: the installed method; set when training begins.
        run_metadata: facts about the run, written with the method into checkpoints' adapters.
        routing_file: receives one line of JSON, the routing at that step, at every evaluation.

    Raises:
        RecipeError: an unknown preset, term or option.
        OutputExistsError: ``output`` is not empty (raised when training begins).
        ObjectiveError: a term that reaches nothing trainable, fp16, or a trainer that adds its own
            balance loss (raised when training begins).
    """

    saved_tables: str | None = None
    """Set by transformers alone, in an object that it makes of :meth:`state`."""

    def __init__(
        self,
        method: str | dict[str, Any] | Method | None = None,
        *,
        output: str | Path | None = None,
        dropout: float = 0.0,
        kernel: Kernel = "auto",
        **overrides: Any,
    ):
        if method is None:
            raise RecipeError(
                'SpecializationCallback: name a method ("orthogonal_variance"), or "none" to '
                "log routing metrics without any loss"
            )
        warn_of_untested()
        self.method = resolve_method(method, **overrides)
        self.output = None if output is None else Path(output)
        self.dropout = dropout
        self.kernel: Kernel = kernel
        self.specialization: Specialization | None = None
        self.run_metadata: dict[str, Any] = {}
        self.routing_file: Path | None = None
        self._run: HostRun | None = None
        self._window = AccumulationWindow()
        self._collapse = CollapseWatch(self)

    @classmethod
    def from_section(cls, section: str | Mapping[str, Any]) -> SpecializationCallback:
        """Build the callback from another program's config section; see :meth:`split_section`."""
        method, options = cls.split_section(section)
        return cls(method, **options)

    @staticmethod
    def split_section(section: Any) -> tuple[str | dict[str, Any], dict[str, Any]]:
        """Split one mapping, or a preset's name, into a method and this callback's options."""
        if isinstance(section, str):
            return section, {}
        if not isinstance(section, Mapping):
            raise RecipeError(
                "specialization: must be a preset's name or a mapping such as {preset: "
                "orthogonal_variance, share: 0.1} (ms-swift: in the variable SPECIALIZATION), "
                "not " + ("no section" if section is None else repr(section))
            )
        options = {key: section[key] for key in OPTIONS if section.get(key) is not None}
        dropout = options.get("dropout", 0.0)
        for key, right, expected in (
            ("kernel", options.get("kernel", "auto") in get_args(Kernel), "auto, grouped or loop"),
            ("dropout", isinstance(dropout, int | float) and 0 <= dropout < 1, "from 0 to below 1"),
            ("output", isinstance(options.get("output", ""), str), "a folder's path"),
        ):
            if not right:
                raise RecipeError(f"specialization.{key}: must be {expected}, not {options[key]!r}")
        return {key: value for key, value in section.items() if key not in OPTIONS}, options

    def attach(self, trainer: Trainer) -> SpecializationCallback:
        """Read the accumulation window from ``trainer``, and log before its other callbacks."""
        self.read_from(trainer)
        add_callbacks(trainer, self)
        return self

    def read_from(self, trainer: Trainer) -> None:
        """Read window and evaluation data from ``trainer`` without reordering its callbacks."""
        if getattr(trainer, "aux_loss_enabled", False):
            raise ObjectiveError(OWN_BALANCE_LOSS)
        model: Any = trainer.model
        _LAST_GIVEN[model] = ref(self)
        check_arguments(trainer.args, self.method, backbone_of(model).config)
        self._window.trainer = trainer

    def _replace_earlier(self, model: Any) -> None:
        """Go on as the callback in whose stead transformers made this object.

        It does so at a resume with ``restore_callback_states_from_checkpoint``, from ``state()``
        alone. What the other was given besides is taken over, and both have one state from now on,
        since the code that made the other goes on to read it.
        """
        del self.saved_tables  # they are read from the checkpoint's own state
        reference = _LAST_GIVEN.get(model)
        earlier = reference() if reference is not None else None
        if earlier is None:
            return
        self.output, self.routing_file = earlier.output, earlier.routing_file
        self.run_metadata, self._window = earlier.run_metadata, earlier._window
        earlier.__dict__ = self.__dict__
        if self._window.trainer is not None:
            # A new list, since the trainer is going through the old one.
            handler = self._window.trainer.callback_handler
            handler.callbacks = sorted(handler.callbacks, key=_position)

    # -- the trainer's events -----------------------------------------------------------------

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if model is not None:
            _LAST_GIVEN[model] = ref(self)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.saved_tables is not None:
            self._replace_earlier(model)
        check_arguments(args, self.method, backbone_of(model).config)
        check_all_sharded(model)
        self._window.begin(args, kwargs.get("train_dataloader"), state)
        check_equal_steps(kwargs.get("train_dataloader"))
        previous = on_model(model)
        if previous is not None:
            if previous.run is state:
                raise ObjectiveError(
                    "the trainer has two SpecializationCallbacks; keep one, with the terms of both"
                )
            if previous.balancer is not None and self.method.bias_update is None:
                raise ObjectiveError(
                    "the model still has the routing bias of an earlier training run, which "
                    "this method does not use; remove it with that callback's close(), or set "
                    "bias_update"
                )
            previous.restore()  # a training that raised did not end properly
        self.specialization = specialization = Specialization(
            model, self.method, dropout=self.dropout, kernel=self.kernel, seed=args.seed
        )
        specialization.recorder.change(scale=self._window.scale)
        if state.global_step:
            specialization.load_state_dict(self._tables(state.stateful_callbacks, "the checkpoint"))
        elif previous is not None:
            specialization.carry_over(previous)
        if self.output is not None:
            self._begin_run(specialization, args, state, kwargs)
        try:
            specialization.install()
        except BaseException:
            if self._run is not None:
                self._run.discard()
            raise
        specialization.run = state
        # The stock Trainer calls this at every save, and a checkpoint may lack its state.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self._say_where_the_bias_goes(specialization)
        self._say_what_is_balanced(args.gradient_accumulation_steps)
        if self.output is not None:
            self._say_what_cannot_be_merged(model)

    def on_step_begin(self, args, state, control, **kwargs):
        self._window.step(state)
        self._at_work().begin_step(state.global_step, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self._at_work().step()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.specialization is None or logs is None:
            return
        if "loss" in logs:
            values = self.specialization.read()
            logs.update(values)
            if state.log_history:
                state.log_history[-1].update(values)
            self._collapse.on_log(args, state, control, logs)
        if self._run is not None:
            self._run.log(args, state, control, logs)

    def on_evaluate(self, args, state, control, eval_dataloader=None, **kwargs):
        # The recorder works only during training; a separate evaluation has no method.
        if (
            self.specialization is None
            or not self.specialization.at_work
            or eval_dataloader is None
        ):
            return
        sample = evaluation_sample(self.specialization.recorder, eval_dataloader)
        if sample is None:
            return
        if self.routing_file is not None and ranks.rank() == 0:
            row = {"step": state.global_step, **sample.routing()}
            self.routing_file.parent.mkdir(exist_ok=True)
            with self.routing_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        values = evaluation_metrics(sample)
        if self._window.trainer is not None:
            self._window.trainer.log(values)
        else:
            state.log_history.append({**values, "step": state.global_step})
            if self._run is not None:
                self._run.log(args, state, control, values)

    def on_train_end(self, args, state, control, **kwargs):
        specialization = self._at_work()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            file = Path(state.best_model_checkpoint) / TRAINER_FILE
            remedy = "the best model's tables are missing; use another checkpoint"
            trainer_state = read_object(file, CheckpointError, remedy, finite=False)
            saved = trainer_state.get("stateful_callbacks") or {}
            specialization.load_state_dict(self._tables(saved, str(file)))
        specialization.rest()
        if self._run is not None:
            self._run.end(specialization)

    @property
    def recorder(self) -> Recorder:
        return self._at_work().recorder

    def close(self) -> None:
        """Remove the method from the model; safe to call right after the trainer raised."""
        if self.specialization is not None:
            self.specialization.restore()

    # -- what checkpoints hold ----------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what transformers stores in a checkpoint's ``trainer_state.json``."""
        tables = self.table_state() if self.specialization is not None else {}
        return {
            "args": {
                "method": self.method.model_dump(mode="json"),
                "dropout": self.dropout,
                "kernel": self.kernel,
            },
            "attributes": {"saved_tables": to_text(tables)},
        }

    def table_state(self) -> dict[str, torch.Tensor]:
        """Return weights found for shares, and biases, which are equal on all ranks."""
        return self._at_work().state_dict()

    def describe_adapter(self, folder: Path) -> None:
        """Add bias and metadata to a checkpoint's adapter; called by ResumableTrainer."""
        specialization = self._at_work()
        describe_adapter(
            specialization.model, folder, self.dropout, specialization.balancer, self.run_metadata
        )

    def _begin_run(
        self, specialization: Specialization, args: Any, state: Any, events: Any
    ) -> None:
        assert self.output is not None
        self._run = HostRun(self.output, self.method, self.dropout)
        self._run.begin(specialization, args, state, events, self._window.trainer)
        self.run_metadata, self.routing_file = self._run.metadata, self._run.routing_file

    def _at_work(self) -> Specialization:
        assert self.specialization is not None, (
            "training has not started; call this during or after training"
        )
        return self.specialization

    def _tables(self, saved: dict[str, Any], where: str) -> dict[str, torch.Tensor]:
        """Return the tables in a checkpoint's callback states; empty without this callback's."""
        states = saved.get(type(self).__name__)
        states = states[0] if isinstance(states, list) else states
        return from_text(states["attributes"]["saved_tables"], where) if states else {}

    def _say_where_the_bias_goes(self, specialization: Specialization) -> None:
        family = specialization.recorder.layers[0].family
        if specialization.balancer is None or self.method.export_bias == "drop":
            return
        if family.bias_export == "none":
            log.warning(
                "WARNING: method.bias_update: a checkpoint of %s cannot store a routing bias. "
                "It is saved with an adapter, where 'analyze' reads it, but a merged or served "
                "model routes without it, unlike in training. Set export_bias: drop to accept "
                "that, or balance with the load_balance term",
                family.title,
            )

    def _say_what_cannot_be_merged(self, model: Any) -> None:
        config = getattr(model, "peft_config", {}).get(getattr(model, "active_adapter", None))
        reason = None if config is None else no_merge_because(config.to_dict())
        if reason is not None:
            log.warning(
                "WARNING: the adapter in %s cannot be merged by moe-finetune: %s. PEFT converts it "
                "with the adapter as it is now, before training: to have that, stop, set "
                "peft_config[...].init_lora_weights = True, call model.save_pretrained('initial'), "
                "and after training model.save_pretrained(..., "
                "path_initial_model_for_weight_conversion='initial')"
                if "init_lora_weights" in reason
                else "WARNING: the adapter in %s cannot be merged by moe-finetune: %s",
                self.output,
                reason,
            )

    def _say_what_is_balanced(self, micro_batches: int) -> None:
        balance: Any = self.method.terms.get("load_balance")
        if balance is not None and balance.scope == "global_batch" and micro_batches > 1:
            log.warning(
                "method.terms.load_balance.scope: global_batch balances one micro-batch of all "
                "processes, not the %d micro-batches of a step (gradient_accumulation_steps); for "
                "a wider balance raise per_device_train_batch_size and lower accumulation",
                micro_batches,
            )
