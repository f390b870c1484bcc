"""Run under another transformers: what it reads in a folder, as JSON and tensors.

``python read.py FOLDER...`` writes ``FOLDER.answer``; needs nothing of this package.
"""

import json
import sys

import torch
import transformers
from safetensors.torch import save_file

IDS = [[5, 9, 17, 40, 7], [11, 3, 260, 8, 6]]
TEXT = "The 3 quick foxes\n  jumped: émigré <extra>!"
TURNS = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b!"}]


def read(folder: str) -> tuple[torch.Tensor, dict]:
    """Logits (2, 5, V), float32, of :data:`IDS`, and what the small files say."""
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(IDS)).logits
    return logits, {
        "version": transformers.__version__,
        "not loaded": sorted(map(str, [*loaded["missing_keys"], *loaded["unexpected_keys"]])),
        "ids": tokenizer(TEXT).input_ids,
        "special": sorted(tokenizer.all_special_tokens),
        "chat": tokenizer.apply_chat_template(TURNS, tokenize=False),
        "ends": model.generation_config.eos_token_id,
    }


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        logits, said = read(folder)
        save_file({"logits": logits}, f"{folder}.answer", metadata={"said": json.dumps(said)})
