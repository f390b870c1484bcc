import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_finetune.checkpoint.load import load_model
from moe_finetune.data.batches import fill
from moe_finetune.upcycle import merge_experts
from moe_finetune.upcycle.frequencies import count_table
from moe_finetune.upcycle.judgement import PROMPTS, judge, questions
from moe_finetune.upcycle.measure import measure, passages, text_losses
from moe_finetune.upcycle.schema import JudgementSection, UpcycleRecipe
from moe_finetune.upcycle.texts import SPLITS, Texts
from tests.support import tiny
from tests.upcycle import dense

EXPERTS, TOP_K, LENGTH = 5, 2, 23


def documents(texts, split, category):
    return texts.ids(texts.numbers(split, category))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    files = dense.write_categories(tmp_path_factory.mktemp("texts"), 4, texts=15)
    categories = {}
    for name, file in files.items():
        with open(file) as lines:
            categories[name] = [json.loads(line)["text"] for line in lines]
    return Texts.tokenize(categories, tiny.tokenizer(), 0, tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def recipe():
    return UpcycleRecipe.model_validate(
        {
            "dense": {"path": "unused", "dtype": "float32"},
            "texts": {"categories": dict.fromkeys("abcde", "unused"), "max_length": LENGTH},
            "clusters": {"count": EXPERTS},
            "arms": {"one": {"start": "merged"}},
            "evaluation": {"tokens_per_batch": 90, "judgement": {"items": 6, "piece": 5}},
        }
    )


@pytest.fixture(scope="module")
def table(texts):
    counts_CV = texts.counts(tiny.VOCABULARY)
    generator = np.random.default_rng(1)
    per_expert = generator.multinomial(1, np.full(EXPERTS, 1 / EXPERTS), counts_CV.shape)
    by_expert = (counts_CV[..., None] * per_expert).sum(0).T
    return count_table(by_expert, np.arange(EXPERTS), EXPERTS, "t")


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    experts = [dense.save("llama", folder / str(seed), seed) for seed in range(EXPERTS)]
    merge_experts(experts, folder / "moe", top_k=TOP_K, router_std=0.6)
    return folder / "moe"


def routing_by_hand(model, rows, table):
    """Every quantity token by token and layer by layer, from the routers' own outputs."""
    outputs = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, a, output: outputs.append(output))
        for layer in model.model.layers
    ]
    ranks = ([], [])
    entropies, score_entropies = [], []
    selected = np.zeros((4, 3, EXPERTS), int)
    for category, ids in rows:
        outputs.clear()
        with torch.no_grad():
            model(torch.tensor([ids.tolist()]))
        for layer, (logits, _, index) in enumerate(outputs):
            for t, token in enumerate(ids.tolist()):
                p = logits[t].double().softmax(-1)
                entropies.append(-sum(float(x) * math.log(float(x)) for x in p))
                scores = p[index[t]] / p[index[t]].sum()
                score_entropies.append(-sum(float(x) * math.log(float(x)) for x in scores))
                order = sorted(range(EXPERTS), key=lambda e: -float(logits[t, e]))
                for expert in index[t].tolist():
                    selected[category, layer, expert] += 1
                counts = table.counts_VN[token]
                if counts.sum() == 0:
                    continue
                for k in (0, 1):
                    own = counts[order[k]]
                    ranks[k].append(1 + sum(int(c > own) for c in counts))
    for hook in hooks:
        hook.remove()
    return ranks, entropies, score_entropies, selected


def test_measurements_are_those_of_slow_loops(moe_folder, texts, table, recipe):
    found, snapshot = measure(moe_folder, texts, table, recipe, moe=True)
    model = load_model(moe_folder)
    for split in SPLITS:
        rows = [(c, ids) for c in range(4) for ids in texts.windows(split, c, LENGTH)]
        losses = []
        for _, ids in rows:
            with torch.no_grad():
                logits = model(torch.tensor([ids.tolist()])).logits[0].double().log_softmax(-1)
            chosen = [float(logits[t, ids[t + 1]]) for t in range(len(ids) - 1)]
            losses.append(-sum(chosen) / len(chosen))
        perplexities = [math.exp(loss) for loss in losses]
        said = found["splits"][split]["perplexity"]
        assert said["count"] == len(rows)
        assert said["mean"] == pytest.approx(np.mean(perplexities), rel=1e-4)
        assert said["std"] == pytest.approx(np.std(perplexities), rel=1e-3)
        tokens = sum(len(ids) - 1 for _, ids in rows)
        whole = sum(x * (len(ids) - 1) for x, (_, ids) in zip(losses, rows, strict=True))
        assert said["of_all_tokens"] == pytest.approx(math.exp(whole / tokens), rel=1e-4)

        ranks, entropies, score_entropies, selected = routing_by_hand(model, rows, table)
        routing = found["splits"][split]["routing"]
        for k in (0, 1):
            summary = routing[f"cmr_{k + 1}"]
            assert summary["count"] == len(ranks[k]) > 0
            assert summary["mean"] == pytest.approx(np.mean(ranks[k]))
            assert summary["std"] == pytest.approx(np.std(ranks[k]))
        for name, all_T in (("s_rl", entropies), ("score_entropy", score_entropies)):
            assert routing[name]["mean"] == pytest.approx(np.mean(all_T), rel=1e-5)
            assert routing[name]["std"] == pytest.approx(np.std(all_T), rel=1e-3)
        assert np.array_equal(routing["selected"], selected)
        if split == "test":
            assert np.array_equal(snapshot["load"], selected.sum(0))
            assert np.array_equal(list(snapshot["domains"].values()), selected)
    assert list(snapshot["domains"]) == list(texts.categories)
    assert (snapshot["top_k"], snapshot["num_experts"]) == (TOP_K, EXPERTS)
    assert len(snapshot["colored_text"]) == 4 and snapshot["layers"] == [0, 1, 2]
    assert found["judgement"]["count"] == 6


def test_a_dense_model_has_perplexity_and_no_routing(texts, table, recipe, tmp_path):
    folder = dense.save("llama", tmp_path / "dense", 2)
    found, snapshot = measure(folder, texts, table, recipe, moe=False)
    assert "routing" not in found["splits"]["test"] and snapshot is None
    assert found["splits"]["test"]["perplexity"]["mean"] > 1


def test_batching_and_padding_change_nothing():
    model = dense.model("llama", 1)
    generator = np.random.default_rng(0)
    rows = [(i, generator.integers(4, 260, n)) for i, n in enumerate((9, 2, 31, 17, 5, 31))]
    with torch.no_grad():
        alone = {i: text_losses(model, [ids])[0] for i, ids in rows}
        seen = {}
        for batch in fill(rows, 40, lambda row: len(row[1])):
            assert len(batch) == 1 or len(batch) * max(len(ids) for _, ids in batch) <= 40
            losses = text_losses(model, [ids for _, ids in batch])
            seen |= {i: loss for (i, _), loss in zip(batch, losses, strict=True)}
    assert seen == pytest.approx(alone, abs=1e-5)


def test_passages_show_the_first_expert_of_the_middle_layer(moe_folder, texts, table):
    model = load_model(moe_folder)
    counts_VN = table.counts_VN.copy()
    unknown = int(texts.windows("test", 3, 120)[0][2])
    counts_VN[unknown] = 0
    shown = passages(model, tiny.tokenizer(), texts, counts_VN, 2)
    assert [passage["domain"] for passage in shown] == ["kind0", "kind3"]
    ids = texts.windows("test", 3, 120)[0]
    outputs = []
    hook = model.model.layers[1].mlp.gate.register_forward_hook(
        lambda m, a, output: outputs.append(output[0])
    )
    with torch.no_grad():
        model(torch.tensor([ids.tolist()]))
    hook.remove()
    assert shown[1]["experts"] == outputs[0].argmax(-1).tolist()
    assert shown[1]["layer"] == 1
    (other,) = passages(model, tiny.tokenizer(), texts, counts_VN, 1, layer=2)
    assert other["layer"] == 2 and other["experts"] != shown[0]["experts"]
    for token, frequent in zip(ids.tolist(), shown[1]["frequent"], strict=True):
        most = max(counts_VN[token])
        assert frequent == (-1 if most == 0 else counts_VN[token].tolist().index(most))
    assert -1 in shown[1]["frequent"] and len(set(shown[1]["frequent"])) > 2
    assert "".join(shown[1]["tokens"]) == tiny.tokenizer().decode(ids)


# -- judgement ------------------------------------------------------------------------------------


class Oracle:
    """A model of which every prompt's answer is decided by ``says``."""

    def __init__(self, says):
        self.says = says
        self.prompts: list[str] = []
        self.parameter = torch.nn.Parameter(torch.zeros(1))

    def parameters(self):
        return iter([self.parameter])

    def __call__(self, input_ids, use_cache, logits_to_keep):
        text = tiny.tokenizer().decode(input_ids[0])
        prompt, _, _ = text.rpartition(" ")
        self.prompts.append(prompt)
        wanted = " yes" if self.says(prompt) else " no"
        logits = torch.zeros(1, logits_to_keep, tiny.VOCABULARY)
        for place, token in enumerate(tiny.tokenizer().encode(wanted)[:logits_to_keep]):
            logits[0, place, token] = 9.0
        return SimpleNamespace(logits=logits)


def pieces(question: str) -> tuple[str, str]:
    body = question.rpartition("First: ")[2].partition("\nThe second")[0]
    first, _, second = body.partition("\nSecond: ")
    return first, second


def test_made_questions_have_the_right_answers(texts):
    tokenizer = tiny.tokenizer()
    section = JudgementSection(shots=5, items=40, piece=9)
    solved, asked = questions(tokenizer, texts, section)
    assert len(solved) == 5 and len(asked) == 40
    whole = {
        split: [tokenizer.decode(ids) for c in range(4) for ids in documents(texts, split, c)]
        for split in ("train", "test")
    }
    for split, found in (("train", solved), ("test", asked)):
        for number, question in enumerate(found):
            first, second = pieces(question.text)
            follows = any(first + second in text for text in whole[split])
            assert question.answer == follows == (number % 2 == 0)


def test_accuracy_is_that_of_the_likelier_answer(texts):
    tokenizer = tiny.tokenizer()
    section = JudgementSection(shots=3, items=20, piece=9)
    whole = [tokenizer.decode(ids) for c in range(4) for ids in documents(texts, "test", c)]
    knows = Oracle(lambda prompt: any("".join(pieces(prompt)) in text for text in whole))
    assert judge(knows, tokenizer, texts, section)["accuracy"] == 1
    always = judge(Oracle(lambda prompt: True), tokenizer, texts, section)
    assert (always["accuracy"], always["yes"], always["count"]) == (0.5, 1.0, 20)
    assert always["stderr"] == pytest.approx(math.sqrt(0.25 / 20))
    prompt = knows.prompts[0]
    assert prompt.count("First: ") == 4 and [a in prompt for a in PROMPTS["en"].answers] == [
        True,
        True,
    ]


def test_questions_of_a_file(texts, tmp_path):
    file = tmp_path / "questions.jsonl"
    rows = [
        f'{{"question": "Is {i} even?", "answer": {str(i % 2 == 0).lower()}}}' for i in range(9)
    ]
    file.write_text("\n".join(rows))
    section = JudgementSection(file=str(file), shots=2)
    even = Oracle(lambda prompt: int(prompt.rpartition("Is ")[2].partition(" ")[0]) % 2 == 0)
    found = judge(even, tiny.tokenizer(), texts, section)
    assert (found["accuracy"], found["count"], found["shots"]) == (1.0, 7, 2)
    assert even.prompts[0].startswith("Question: Is 0 even?\nAnswer: yes\n\nQuestion: Is 1")
    assert found["categories"] == {}


def test_questions_beyond_the_limit_are_named(texts, tmp_path, caplog):
    file = tmp_path / "questions.jsonl"
    rows = [json.dumps({"question": str(i), "answer": i % 3 == 0}) for i in range(12)]
    file.write_text("\n".join(rows))
    section = JudgementSection(file=str(file), shots=2, items=7)
    _, asked = questions(tiny.tokenizer(), texts, section)
    assert [question.text.split()[1] for question in asked] == [str(i) for i in range(2, 9)]
    assert (
        "only the first 7 of 10 questions are used; raise evaluation.judgement.items" in caplog.text
    )


def word_marked():
    """A tokenizer like Llama 2's: a word mark before every text, spaces as marks, and a BOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"▁\nQuestion: {}\nAnswer:noyes0123456789even? Is"})
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("▁", "n")]
    words = [*letters, *(left + right for left, right in merges)]
    vocabulary = {word: number + 3 for number, word in enumerate(dict.fromkeys(words))}
    core = Tokenizer(
        BPE({"<unk>": 0, "<s>": 1, "</s>": 2, **vocabulary}, merges, unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    core.add_special_tokens([AddedToken(each, special=True) for each in ("<unk>", "<s>", "</s>")])
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_a_prompt_is_tokenized_whole_with_the_models_bos(texts, tmp_path):
    file = tmp_path / "questions.jsonl"
    rows = [json.dumps({"question": f"Is {i} even?", "answer": i % 2 == 0}) for i in range(4)]
    file.write_text("\n".join(rows))
    tokenizer, seen = word_marked(), []

    class Model(Oracle):
        def __call__(self, input_ids, use_cache, logits_to_keep):
            seen.append((input_ids[0].tolist(), logits_to_keep))
            return SimpleNamespace(logits=torch.zeros(1, logits_to_keep, 99))

    found = judge(Model(None), tokenizer, texts, JudgementSection(file=str(file), shots=2))
    solved = "Question: Is 0 even?\nAnswer: yes\n\nQuestion: Is 1 even?\nAnswer: no\n\n"
    whole = [f"{solved}Question: Is {i} even?\nAnswer:{a}" for i in (2, 3) for a in (" no", " yes")]
    assert [ids for ids, _ in seen] == [tokenizer(text)["input_ids"] for text in whole]
    assert all(ids[0] == 1 and ids.count(1) == 1 for ids, _ in seen)
    # "▁n", "o" and "▁yes": an answer apart would have a mark of its own.
    assert [count - 1 for _, count in seen] == [2, 1, 2, 1]
    assert found["answer_tokens"] == [2, 1]


class PerToken(Oracle):
    """Gives every token of yes and of no a probability of its own."""

    def __init__(self, no, yes):
        super().__init__(None)
        self.shares = {" no": no, " yes": yes}

    def __call__(self, input_ids, use_cache, logits_to_keep):
        text = tiny.tokenizer().decode(input_ids[0])
        word = " yes" if text.endswith(" yes") else " no"
        ids, share = tiny.tokenizer().encode(word), self.shares[word]
        assert logits_to_keep == len(ids) + 1
        rest = (1 - share) / (tiny.VOCABULARY - 1)
        logits = torch.full((1, len(ids) + 1, tiny.VOCABULARY), math.log(rest))
        for place, token in enumerate(ids):
            logits[0, place, token] = math.log(share)
        return SimpleNamespace(logits=logits)


def test_a_longer_answer_is_not_at_a_disadvantage(texts):
    """Of " yes" each token is likelier, but it has one more: the sum alone would say no."""
    section = JudgementSection(shots=2, items=20, piece=9)
    found = judge(PerToken(0.45, 0.5), tiny.tokenizer(), texts, section)
    no, yes = found["answer_tokens"]
    assert yes > no and 0.5**yes < 0.45**no
    assert found["yes"] == 1.0
    assert judge(PerToken(0.5, 0.45), tiny.tokenizer(), texts, section)["yes"] == 0.0
    right = sum(right for right, _ in found["categories"].values())
    assert sum(asked for _, asked in found["categories"].values()) == 20
    assert right == 20 * found["accuracy"] and set(found["categories"]) <= set(texts.categories)


def test_questions_in_japanese(texts, tmp_path):
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question": f"{i}は偶数ですか", "answer": i % 2 == 0, "category": "数"} for i in range(4)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = tiny.tokenizer()
    solved, asked = questions(
        tokenizer, texts, JudgementSection(file=str(file), shots=1, language="ja")
    )
    assert solved[0].text == "質問：0は偶数ですか\n答え："
    assert [question.category for question in asked] == ["数"] * 3
    section = JudgementSection(shots=1, items=4, piece=5, language="ja")
    _, made = questions(tokenizer, texts, section)
    assert made[0].text.endswith("\n後半は前半の続きですか：")
