import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_finetune.errors import CheckpointError, DataError
from moe_finetune.losses.supervised_routing import load_token_frequencies
from moe_finetune.models.config_and_tokenizer import load_tokenizer
from moe_finetune.upcycle.frequencies import FrequencyTable, count_table, tokenizer_hash
from tests.support import tiny

EXPERTS, VOCABULARY, CATEGORIES = 3, 17, 7


@pytest.fixture
def counts_CV():
    counts = np.random.default_rng(0).integers(0, 6, (CATEGORIES, VOCABULARY))
    counts[:, 5] = 0
    return counts


CLUSTERS = np.array([2, 0, 1, 1, 0, 2, 1])


def test_table_is_each_tokens_share_of_the_clusters(counts_CV, tmp_path):
    table = count_table(counts_CV, CLUSTERS, EXPERTS, "t")
    for token in range(VOCABULARY):
        counts = [0] * EXPERTS
        for category, cluster in enumerate(CLUSTERS):
            counts[cluster] += int(counts_CV[category, token])
        assert table.counts_VN[token].tolist() == counts
        for expert in range(EXPERTS):
            expected = counts[expert] / sum(counts) if sum(counts) else 1 / EXPERTS
            assert table.frequencies_VN[token, expert] == pytest.approx(expected)
    assert table.frequencies_VN[5].tolist() == pytest.approx([1 / 3] * 3)
    np.testing.assert_allclose(table.frequencies_VN.sum(1), 1, rtol=1e-6)

    table.save(tmp_path / "table.safetensors")
    loaded = FrequencyTable.load(tmp_path / "table.safetensors", "t", VOCABULARY, EXPERTS)
    assert (loaded.counts_VN == table.counts_VN).all()
    read_by_the_loss = load_token_frequencies(tmp_path / "table.safetensors")
    assert np.array_equal(read_by_the_loss.numpy(), table.frequencies_VN)


def test_a_table_of_something_else_is_refused(counts_CV, tmp_path):
    file = tmp_path / "table.safetensors"
    count_table(counts_CV, CLUSTERS, EXPERTS, "t").save(file)
    with pytest.raises(DataError, match=r"shape \(17, 3\), but this model has 18 tokens and 3"):
        FrequencyTable.load(file, "t", 18, EXPERTS)
    with pytest.raises(DataError, match="17 tokens and 4 experts"):
        FrequencyTable.load(file, "t", VOCABULARY, 4)
    with pytest.raises(DataError, match="counted with another tokenizer"):
        FrequencyTable.load(file, "other", VOCABULARY, EXPERTS)
    with pytest.raises(DataError, match="is not a table of token frequencies"):
        FrequencyTable.load(tmp_path / "nowhere", "t", VOCABULARY, EXPERTS)
    save_file({"something": np.ones(3)}, file)
    with pytest.raises(DataError, match="is not a table of token frequencies"):
        FrequencyTable.load(file, "t", VOCABULARY, EXPERTS)


def test_a_cluster_without_tokens_is_refused(counts_CV):
    counts_CV[CLUSTERS == 1] = 0
    with pytest.raises(DataError, match="cluster 1 is empty"):
        count_table(counts_CV, CLUSTERS, EXPERTS, "t")


def test_a_tokenizers_hash_survives_saving_and_sees_a_change(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path / "a")
    loaded = load_tokenizer(tmp_path / "a")
    loaded(["a", "longer"], padding=True, truncation=True, max_length=3)
    loaded.save_pretrained(tmp_path / "b")
    assert tokenizer_hash(tmp_path / "a") == tokenizer_hash(tmp_path / "b")
    content = json.loads((tmp_path / "b/tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "b/tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_hash(tmp_path / "a") != tokenizer_hash(tmp_path / "b")
    (tmp_path / "b/tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        tokenizer_hash(tmp_path / "b")
    (tmp_path / "b/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        tokenizer_hash(tmp_path / "b")
