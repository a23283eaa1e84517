"""Evidence as audits write it, built by hand: shards that pass, fail, are waived, or hold what is hostile to a page."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

EDGES = [0, 1, *(2**power for power in range(1, 18))]
SOURCES = ["chat/english", "chat/français", "code", "maths"]

# Texts that a page could mistake for its own: each must come out as the text that it is.
HOSTILE = [
    "<script>document.title = 'owned'; window.owned = 1</script>",
    '</pre></style></script><img src=x onerror="window.owned = 1">',
    '<a href="javascript:window.owned = 1">click</a> [link](javascript:window.owned=1)',
    '</title></textarea><svg onload="window.owned = 1"><iframe src="https://example.com/"></iframe>',
    "{{ 7 * 7 }} {% raw %} ${7*7} &lt;b&gt; &amp;",
    "\x1b[31mred\x1b[0m \x00 NUL \x07 bell \x9b31m",
    "\ud800 half, \u202etxet desrever\u202c, \ufeff mark, \u2028 line",
    "\"><input autofocus onfocus=window.owned=1> ' onmouseover='window.owned=1",
]


def spread(values: list[int]) -> dict[str, Any]:
    """Return the distribution of some numbers, one per row."""
    ordered = sorted(values)
    bins = [sum(low <= value < high for value in values) for low, high in pairwise(EDGES)]
    counts = sorted(
        ((values.count(value), value) for value in set(values)),
        key=lambda pair: (-pair[0], pair[1]),
    )
    quantiles = {
        f"{q:g}": float(ordered[int(q * (len(ordered) - 1))]) for q in (0, 0.5, 1) if ordered
    }
    return {
        "rows": len(values),
        "total": sum(values),
        "quantiles": quantiles,
        "most_frequent": [{"value": value, "rows": rows} for rows, value in counts[:10]],
        "histogram": {"edges": EDGES, "rows": bins},
    }


def share_check(name: str, count: int, of: int, limit: float, why: str) -> dict[str, Any]:
    """Return the judgement of a check on a share of rows."""
    share = count / of if of else None
    failed = of > 0 and count > limit * of
    verdict = "not judged" if not of else "fail" if failed else "pass"
    cases = [
        {"sample_id": f"p{row}_gen0", "seen": f"answer '<think>\\n\\n</think>' of row {row}"}
        for row in range(min(count, 10))
    ]
    return {
        "name": name, "verdict": verdict, "value": share, "limit": limit, "unit": "share of rows",
        "severity": share / limit if share else 0.0, "count": count, "of": of, "allowed": int(limit * of),
        "seen": f"{count} of {of} rows have an {name.replace('_', ' ')}", "why": why, "evidence": cases,
    }  # fmt: skip


def median_check(value: float | None, rows: int) -> dict[str, Any]:
    """Return the judgement of the check on the median row."""
    verdict = "not judged" if value is None else "pass" if value >= 32 else "fail"
    return {
        "name": "median_loss_tokens", "verdict": verdict, "value": value, "limit": 32, "unit": "tokens, at least",
        "severity": 32 / value if value else 0.0, "count": 0, "of": rows, "allowed": None,
        "seen": f"half of {rows} rows have {value} supervised tokens or fewer",
        "why": "DFlash learns from blocks of 16 tokens and trainers want two of them.", "evidence": [],
    }  # fmt: skip


def evidence(
    shard: str | None = "00000", *, rows: int = 200, empty: int = 0, seed: int = 1
) -> dict[str, Any]:
    """Return the evidence on a shard of `rows` rows, of which `empty` have an empty answer (7 supervised tokens)."""
    thoughts = [0 if row < empty else 40 + (row * 37 * seed) % 900 for row in range(rows)]
    answers = [7 if row < empty else 20 + (row * 53 * seed) % 400 for row in range(rows)]
    prompts = [12 + (row * 29 * seed) % 700 for row in range(rows)]
    masks = [sum(pair) for pair in zip(thoughts, answers, strict=True)]
    cut = rows // 20
    checks = [
        {
            "name": "unbalanced_rows", "verdict": "pass", "value": 0, "limit": 0, "unit": "rows", "severity": 0.0,
            "count": 0, "of": rows, "allowed": 0, "seen": f"0 contradictions between {rows} prompts and {rows} rows",
            "why": "A prompt that is lost or repeated makes every later count wrong.", "evidence": [],
        },
        share_check("empty_answer_share", empty, rows, 0.01, "An answer that says nothing teaches the drafter to draft nothing."),
        share_check("truncated_share", cut, rows, 0.2, "A truncated answer never shows its end."),
        median_check(float(sorted(masks)[rows // 2]) if rows else None, rows),
    ]  # fmt: skip
    per_source = {
        name: {
            "prompts": n,
            "generated": n,
            "answered": n,
            "trained": n,
            "loss_tokens": sum(masks[place :: len(SOURCES)]),
        }
        for place, name in enumerate(SOURCES)
        for n in [len(masks[place :: len(SOURCES)])]
    }
    return {
        "schema_version": "2",
        "shard": shard,
        "verdict": "fail" if any(check["verdict"] == "fail" for check in checks) else "pass",
        "tokenized_sha256": f"{seed:064x}",
        "generated_fingerprint": "f" * 64,
        "rows": {
            "prompts": rows, "generated": rows, "ok": rows - cut, "truncated": cut, "tool_calls": 0, "skipped": 0,
            "error": 0, "tokenized": rows, "dropped": {"too_long": 0, "too_few_loss_tokens": 0},
        },
        "checks": checks,
        "distribution": {
            "mask_sum": spread(masks),
            "seq_len": spread([mask + prompt for mask, prompt in zip(masks, prompts, strict=True)]),
            "prompt_tokens": spread(prompts),
            "reasoning_tokens": spread(thoughts),
            "answer_tokens": spread(answers),
            "finish_reason": {"stop": rows - cut, "length": cut},
            "sources": per_source,
            "retokenization": {
                "rows": rows, "differing": min(rows, 1),
                "examples": [{"sample_id": "p3_gen0", "at": 41, "engine": "[785, 220]", "rendered": "[785, 256]"}] if rows else [],
            },
        },
        "examples": [
            {
                "sample_id": f"p{row}_gen0", "source": SOURCES[row % len(SOURCES)], "status": "ok",
                "prompt": "user: How do I sharpen a kitchen knife?",
                "reasoning": "" if row < empty else "The user wants a short method.\nA whetstone is the usual tool.",
                "answer": "" if row < empty else "Use a whetstone: hold the blade at 15 to 20 degrees and draw it across.",
            }
            for row in range(min(rows, 6))
        ],
    }  # fmt: skip


def hostile_evidence(shard: str = "00000") -> dict[str, Any]:
    """Return evidence of a failed shard in which every text that comes from data is hostile."""
    found = evidence(shard, empty=100)
    found["examples"] = [
        {
            "sample_id": text,
            "source": text,
            "status": text,
            "prompt": text,
            "reasoning": text,
            "answer": text,
        }
        for text in HOSTILE
    ]
    for check in found["checks"]:
        check["evidence"] = [{"sample_id": text, "seen": text} for text in HOSTILE]
        check["seen"] = check["why"] = HOSTILE[0]
    distribution = found["distribution"]
    distribution["finish_reason"] = dict.fromkeys(HOSTILE, 3)
    distribution["sources"] = {text: distribution["sources"]["code"] for text in HOSTILE}
    distribution["retokenization"]["examples"] = [
        {"sample_id": text, "at": 1, "engine": text, "rendered": text} for text in HOSTILE
    ]
    found["rows"]["dropped"] = dict.fromkeys(HOSTILE, 1)
    return found


def write_run(
    folder: Path, *parts: dict[str, Any], waived: dict[str, str] | None = None
) -> list[Path]:
    """Write a run's folder with the evidence of these shards, approvals, manifests, recipe and times; return the evidence."""
    paths = []
    for number, part in enumerate(parts):
        name = part["shard"] or f"{number:05d}"
        paths.append(write(folder / "audit" / f"{name}.json", part))
        reason = (waived or {}).get(name)
        if part["verdict"] == "pass" or reason:
            approval = {
                "shard": name, "verdict": "waived" if reason else "pass", "reason": reason,
                "tokenized_sha256": part["tokenized_sha256"],
            }  # fmt: skip
            write(folder / "audit" / f"{name}.approved", approval)
        for rule, seconds in [
            ("generate_shard", 5400.5),
            ("extract_hidden_states", 2700.25),
            ("audit_shard", 3.5),
        ]:
            write_time(folder / "benchmarks" / rule / f"{name}.tsv", seconds)
    write_time(folder / "benchmarks" / "stage_model.tsv", 61.0)
    sources = [{"path": "prompts.jsonl", "sha256": "d" * 64}]
    write(folder / "prompts" / "manifest.json", {
        "sources": sources, "rows": 820, "accepted": 800, "rejected": 20, "rejected_reasons": {"too_long": 20},
    })  # fmt: skip
    write(folder / "model" / "manifest.json", {
        "source": "hub:Qwen/Qwen3.6-27B", "revision": "a" * 40, "architecture": "Qwen3_5ForConditionalGeneration",
        "dtype": "bfloat16", "num_hidden_layers": 64, "hidden_size": 5120, "vocab_size": 248320,
        "context_length": 262144, "content_sha256": "c" * 64,
    })  # fmt: skip
    sampling = {"temperature": 1, "top_p": 0.95, "chat_template_kwargs": {"enable_thinking": True}}
    write(folder / "recipe.json", {
        "run": folder.name,
        "phases": {"generate": {"settings": {"sampling": sampling}, "semantics": 1, "fingerprint": "e" * 64}},
    })  # fmt: skip
    return paths


def write(path: Path, value: Any) -> Path:
    """Write JSON, halves of surrogate pairs escaped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_time(path: Path, seconds: float) -> None:
    """Write a benchmark file as Snakemake does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"s\th:m:s\tmax_rss\n{seconds}\t0:00:00\t1.0\n")
