"""People as judges: export blinded sheets, import annotations."""

import base64
import csv
import hashlib
import html
import io
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_finetune.errors import DataError, EvaluationError
from moe_finetune.io import write_atomic
from moe_finetune.io.hashes import sha256_text, to_json
from moe_finetune.io.json_file import read_object
from moe_finetune.io.rows import read_rows

COLUMNS = ("id", "question", "reference", "answer", "verdict", "comment")
_YES = {"correct", "yes", "y", "1", "true", "right"}
_NO = {"incorrect", "no", "n", "0", "false", "wrong"}


@dataclass(frozen=True)
class Sheets:
    """Files of :func:`export_sheets`; give annotators ``csv`` or ``html``, but not ``key``."""

    csv: Path
    html: Path
    key: Path
    n: int


def export_sheets(
    answers: Mapping[str, Mapping[tuple[str, int, str], tuple[str, str, str]]],
    folder: str | Path,
    n: int = 100,
) -> Sheets:
    """Write a blinded sheet over the answers of one or more methods.

    The same items are drawn for every method; rows are shuffled, and their codes reveal neither
    method nor item. A separate key file resolves the codes.

    Args:
        answers: method -> item (task, doc_id, hash) -> question, reference and answer.
        folder: where ``annotate.csv``, ``annotate.html`` and ``key.json`` go.

    Raises:
        EvaluationError: there is no item that all methods answered.
    """
    folder = Path(folder)
    common = sorted(set.intersection(*(set(items) for items in answers.values())))
    if not common:
        raise EvaluationError("the methods have no answered item in common")
    draw = random.Random(0)
    chosen = draw.sample(common, min(n, len(common)))
    rows = []
    key: dict[str, Any] = {}
    for method, item in itertools.product(sorted(answers), chosen):
        # Random, so that the code cannot be recomputed from method and item.
        code = sha256_text(f"{draw.random()}-{method}-{item}")[:10]
        question, reference, answer = answers[method][item]
        rows.append({"id": code, "question": question, "reference": reference, "answer": answer})
        key[code] = {"method": method, "task": item[0], "doc_id": item[1], "item": item[2]}
    draw.shuffle(rows)
    sheets = Sheets(folder / "annotate.csv", folder / "annotate.html", folder / "key.json",
                    len(rows))  # fmt: skip
    text = io.StringIO()
    # All fields are quoted: a carriage return in an answer would end the row.
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows({k: _no_formula(v) for k, v in row.items()} for row in rows)
    write_atomic(sheets.csv, text.getvalue())
    write_atomic(sheets.html, _page(rows))
    write_atomic(sheets.key, to_json(key, 1))
    return sheets


def _no_formula(text: str) -> str:
    # Spreadsheets evaluate cells that begin like this.
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _page(rows: list[dict[str, str]]) -> str:
    cards = "".join(
        f"<article data-id='{row['id']}'><h2>{index} / {len(rows)}</h2>"
        f"<h3>Question</h3><pre>{html.escape(row['question'])}</pre>"
        f"<h3>Reference</h3><pre>{html.escape(row['reference'])}</pre>"
        f"<h3>Answer</h3><pre>{html.escape(row['answer'])}</pre>"
        f"<label><input type='radio' name='{row['id']}' value='correct'> correct</label>"
        f"<label><input type='radio' name='{row['id']}' value='incorrect'> incorrect</label>"
        f"<input type='text' placeholder='comment'></article>"
        for index, row in enumerate(rows, 1)
    )
    script = (
        "const cards=[...document.querySelectorAll('article')];"
        "const pick=c=>(c.querySelector('input:checked')||{}).value||'';"
        "const note=c=>c.querySelector('[type=text]').value;"
        "document.addEventListener('input',()=>{document.getElementById('done').textContent="
        "cards.filter(pick).length});"
        "const q=s=>'\"'+s.replaceAll('\"','\"\"')+'\"';"
        "document.getElementById('save').onclick=()=>{const lines=['id,verdict,comment',"
        "...cards.map(c=>[c.dataset.id,pick(c),q(note(c))].join(','))];"
        "const a=document.createElement('a');a.href=URL.createObjectURL(new Blob([lines.join("
        "'\\n')+'\\n'],{type:'text/csv'}));a.download='annotations.csv';a.click()};"
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'\">"
        "<title>Annotation</title><style>"
        "body{font:16px system-ui;max-width:50rem;margin:2rem auto;padding:0 1rem 5rem}"
        "pre{white-space:pre-wrap;background:#f4f4f5;padding:.7rem;border-radius:.4rem}"
        "article{border-bottom:1px solid #ccc;padding:1rem 0}label{margin-right:1.5rem}"
        "h2,h3{font-size:1rem;margin:.6rem 0 .2rem}footer{position:fixed;bottom:0;left:0;right:0;"
        "background:#fff;border-top:1px solid #ccc;padding:.8rem;text-align:center}</style>"
        f"<h1>Is the answer correct?</h1>{cards}"
        "<footer><span id='done'>0</span> of "
        f"{len(rows)} done <button id='save'>Save annotations</button></footer>"
        f"<script>{script}</script></html>\n"
    )


def import_annotations(annotated: str | Path, key: str | Path) -> dict[tuple[str, str, int], bool]:
    """Read an annotated sheet back: (method, task, doc_id) -> correct; blank rows are left out.

    Raises:
        DataError: unknown code or verdict (file and line), or the same code twice.
    """
    path = Path(annotated)
    codes = read_object(Path(key), DataError, "give the key.json that eval --sheets wrote")
    verdicts: dict[tuple[str, str, int], bool] = {}
    for line, row in enumerate(read_rows(path, ("id", "verdict")), 2):
        verdict = (row["verdict"] or "").strip().lower()
        if row["id"] not in codes:
            raise DataError(f"{path}, line {line}: id '{row['id']}' is not in {key}")
        if not verdict:
            continue
        if verdict not in _YES | _NO:
            raise DataError(
                f"{path}, line {line}: verdict '{row['verdict']}' must be 'correct' or 'incorrect'"
            )
        item = codes[row["id"]]
        if not isinstance(item, dict) or not {"method", "task", "doc_id"} <= item.keys():
            raise DataError(f"{key}: '{row['id']}' lacks method, task or doc_id; export again")
        where = (item["method"], item["task"], item["doc_id"])
        if where in verdicts:
            raise DataError(f"{path}, line {line}: id '{row['id']}' occurs twice")
        verdicts[where] = verdict in _YES
    return verdicts
