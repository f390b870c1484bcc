"""Keys of TRL that a recipe sets elsewhere."""

from __future__ import annotations

OWNED = {
    "output_dir": "it is --output on the command line",
    "resume_from_checkpoint": "it is --resume on the command line",
    "packing": "set data.packing",
    "eval_packing": "set data.packing",
    "packing_strategy": "set data.packing_strategy",
    "padding_free": "set data.packing",
    "max_length": "set data.max_length",
    "truncation_mode": "set data.overlong",
    "completion_only_loss": "set data.completion_only_loss",
    "assistant_only_loss": "set data.completion_only_loss",
    "dataset_num_proc": "set data.num_proc",
    "dataset_text_field": "set data.columns",
    "dataset_kwargs": "the toolkit prepares the data",
    "shuffle_dataset": "the trainer shuffles with trainer.seed",
    "chat_template_path": "set data.chat_template",
    "model_init_kwargs": "set the keys of model",
    "router_aux_loss_coef": "set method.terms.load_balance.weight",
    "remove_unused_columns": "the toolkit prepares the data",
    "trust_remote_code": "remote code is never run",
    "hub_token": "secrets stay out of recipes: set HF_TOKEN or use `hf auth login`",
    "local_rank": "the launcher sets it",
    "do_train": "use the verb `train`",
    "do_eval": "set data.validation",
    "do_predict": "use the verb `eval`",
    "deepspeed": "use FSDP2; see recipes/hardware",
    "parallelism_config": "use an accelerate config; see recipes/hardware",
    "push_to_hub": "use `merge --push`",
}
"""Fields of TRL's configs that a recipe cannot set, and what to do instead."""
