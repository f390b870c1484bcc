import json
import math

import numpy as np
import pytest
import torch
import yaml

from moe_finetune.checkpoint.load_model import load_model
from moe_finetune.data.batches import fill
from moe_finetune.errors import DataError
from moe_finetune.io.row_files import write_jsonl
from moe_finetune.upcycle import merge_experts
from moe_finetune.upcycle.dense_parents import load_dense
from moe_finetune.upcycle.frequencies import count_table
from moe_finetune.upcycle.judgement import check_answers, judge
from moe_finetune.upcycle.measure import measure, text_losses
from moe_finetune.upcycle.schema import UpcycleRecipe
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
            "evaluation": {"tokens_per_batch": 90},
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
    assert snapshot["layers"] == [0, 1, 2]


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


# -- the suite ------------------------------------------------------------------------------------


def write_suite(folder, choices=("no", "ja")):
    """Whether numbers are even, after two solved questions; half of the answers are the second."""
    kind = ("odd", "even")
    rows = [
        {"question": f"Is {n} even?", "choices": list(choices), "answer": (n + 1) % 2,
         "category": f"{kind[(n + 1) % 2]} numbers"}
        for n in range(8)
    ]  # fmt: skip
    task = {"task": "judgement", "template": "local_judgement", "shots": 2, "metric": "acc",
            "files": {"test": "test.jsonl", "train": "train.jsonl"}}  # fmt: skip
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", rows[:2])
    write_jsonl(folder / "test.jsonl", rows[2:])
    (folder / "suite.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": [task]}))
    return str(folder / "suite.yaml")


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_the_likelier_answer_after_the_solved_questions_counts(moe_folder, tmp_path, kind):
    folder = moe_folder if kind == "moe" else dense.save("llama", tmp_path / "dense", 2)
    found = judge(folder, write_suite(tmp_path / "suite"), "float32", tmp_path / "scratch")
    model, tokenizer = (load_model if kind == "moe" else load_dense)(folder), tiny.tokenizer()
    solved = "Is 0 even? ja\n\nIs 1 even? no\n\n"
    right = {"odd numbers": [0, 0], "even numbers": [0, 0]}
    for n in range(2, 8):
        sums = []
        for answer in (" no", " ja"):
            ids = tokenizer(f"{solved}Is {n} even?{answer}", add_special_tokens=False).input_ids
            with torch.no_grad():
                table = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            sums.append(sum(float(table[i - 1, ids[i]]) for i in range(len(ids) - 3, len(ids))))
        counts = right[f"{'even' if n % 2 == 0 else 'odd'} numbers"]
        counts[0] += (sums[1] > sums[0]) == (n % 2 == 0)
        counts[1] += 1
    judgement = found["judgement"]
    assert judgement["categories"] == right and judgement["n"] == 6
    assert judgement["value"] == pytest.approx(sum(counts[0] for counts in right.values()) / 6)


def test_answers_of_other_lengths_are_refused(tmp_path):
    """A sum of log-probabilities favors the shorter one, as of the paper's language."""
    check_answers(write_suite(tmp_path / "same"), tiny.tokenizer())
    for name, choices in (("ja", ("いいえ", "はい")), ("en", ("no", "yes"))):
        with pytest.raises(
            DataError, match=r"test\.jsonl: row 1: its answers have \d+ and \d+ tok"
        ):
            check_answers(write_suite(tmp_path / name, choices), tiny.tokenizer())
