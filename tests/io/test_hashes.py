import os

from moe_finetune.io.hashes import KnownDigests, sha256_file


def test_digests_follow_content_and_not_time(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"one")
    known = KnownDigests(tmp_path / "memo.json")
    assert known(file) == sha256_file(file)
    known.save()
    os.utime(file, ns=(5, 5))
    assert KnownDigests(tmp_path / "memo.json")(file) == sha256_file(file)
    file.write_bytes(b"three")
    assert KnownDigests(tmp_path / "memo.json")(file) == sha256_file(file)
