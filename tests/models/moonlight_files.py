"""A folder with the files that Moonlight publishes for its tokenizer, over a small vocabulary."""

import base64
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

# as published, written out
PUBLISHED_PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
NAMED = {  # offset from the number of ranks -> name
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}
TEMPLATE = (
    "{%- for m in messages -%}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>"
    "{{ m['content'] }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
TEXTS = [
    "The quick brown fox's tail; HTTPServer isn't camelCase, it's PascalCase. We'LL see.",
    "中文和English混合内容。北京市 Pascal 汉字abc，１２３４５年。",
    "日本語のテキスト、カタカナとひらがな。한국어 문장입니다.",
    "Привет, мир! Ещё раз: naïve café, ÅNGSTRÖM, ǅungla, ʰaspirated.",
    "العربية نص קצת עברית हिन्दी में पाठ ไทย",
    "1234567890 3.14159 ½ ٣٤٥\n\n  def f(x):\r\n\treturn x ** 2   \n   \n",
    "🙂👩‍👩‍👧‍👦 e\u0301 \u2028\u2029\u00a0\u3000 ſ's K'Ll \x85 \x1c  end ",
    "<|im_user|>user<|im_middle|>hi<|im_end|>[BOS]",
    "",
]


def train_ranks(size: int = 1500) -> dict[bytes, int]:
    """Byte-pair ranks learned from the texts: the 256 bytes, then merges in their order."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PUBLISHED_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = bytes_to_unicode()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=list(alphabet.values()), show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    back = {letter: byte for byte, letter in alphabet.items()}
    merged = [
        bytes(back[letter] for letter in token)
        for token, _ in sorted(core.get_vocab().items(), key=lambda item: item[1])
        if len(token) > 1
    ]
    tokens = [bytes([byte]) for byte in range(256)] + merged
    return {token: rank for rank, token in enumerate(tokens)}


def write(folder: Path) -> dict[bytes, int]:
    """Write the published files, code included, and return the ranks."""
    ranks = train_ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(len(ranks) + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for offset, name in NAMED.items()
    }
    settings = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [n for n in NAMED.values() if n.startswith("<")],
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1048576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenization_moonshot.py").write_text("raise SystemExit('remote code ran')\n")
    return ranks
