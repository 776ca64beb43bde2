"""One page of every kind, from plain data: long names, many rows, every verdict, a picture."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from halfulp.report.audit_page import audit_page
from halfulp.report.compare_page import compare_page
from halfulp.report.demo_page import demo_page
from halfulp.report.ledger_page import ledger_page
from halfulp.report.pages import experiment_page
from halfulp.report.run_page import record_section, run_page, training_section
from halfulp.report.trial_page import trial_page
from tests.report.test_audit_report import DEFECT, ERROR, SOUND, STOCK, case, row
from tests.report.test_heatmap import figure as heat_map
from tests.report.test_trial_page import isolation

LONG = "BF16_PAPER_STABILIZED[block_query=32,block_key=512,grad_accumulator=bf16]"
CHANGE = (
    "δ from O and its residual; l summed from the rounded weights; the backward pass on the"
    " forward's rounded weights"
)
COMMAND = "halfulp isolate seconds --seeds 3 --out a/folder/with/a_rather_long_name_of_its_own"


def curves(*labels: str, title: str = "Training loss", style: str = "line") -> dict[str, Any]:
    lines = [
        {
            "label": label,
            "x": [1, 2000, 4000] if style == "line" else ["bf16", "fp16", "torch_cpu_flash"],
            "y": [1.0, 0.1 / (i + 1), 0.01 / (i + 1)],
            "low": None,
            "high": None,
            "style": style,
        }
        for i, label in enumerate(labels)
    ]
    return {
        "title": title,
        "x_label": "step",
        "y_label": "mean squared error",
        "x_log": False,
        "y_log": style == "line",
        "series": lines,
        "caption": "Seed 0; a run ends where the rule calls it failed.",
        "command": COMMAND,
    }


def picture() -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (900, 60), "white").save(buffer, format="PNG")
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    alt = "Drawn: grinning face, pile of poo"
    return {"kind": "picture", "title": "run-1", "source": source, "alt": alt, "caption": "Left."}


def many_probes(target: str, verdict: dict[str, Any]) -> dict[str, Any]:
    """An audit of thirty probes, so that its table has tools."""
    cases = [case(f"probe_number_{i}_of_thirty", row("dK error", 1.0, 1.1)) for i in range(26)]
    return verdict | {
        "target": target,
        "cases": [*verdict["cases"], *cases],
        "bounds": {"stock": 1.25, "floor": 1.5},
    }


def ladder() -> dict[str, Any]:
    rows = [
        ["(d) operations", CHANGE, "failed" if i % 3 else "survived", f"{1450 + i}", "loss 1.9e-4"]
        for i in range(12)
    ]
    rows.insert(0, ["emulation", f"{LONG} for torch:flash", "drifting", "–", "mean score moved"])
    table = {
        "title": "Substitution ladder",
        "columns": ["question", "what is changed", "outcome", "failed at step", "decided by"],
        "rows": rows,
        "caption": "4000 steps, seeds 0, 1, 2.",
        "command": COMMAND,
    }
    figures = [curves("as it is", "fp32 attention", CHANGE), curves("torch:flash", LONG, CHANGE)]
    return isolation(tables=[table], figures=figures, notes=[f"Replaced inside {LONG}."])


def record() -> dict[str, Any]:
    machine = {
        "processor": "a processor",
        "cores": 2,
        "vector_instructions": "avx512_bf16",
        "memory": 2**34,
        "gpu": None,
        "system": "Linux",
        "architecture": "x86_64",
    }
    return {
        "halfulp": "0.1.0",
        "command": COMMAND,
        "status": "done",
        "started": "2026-11-21T12:00:00+00:00",
        "ended": "2026-11-21T12:03:00+00:00",
        "machine": machine,
        "versions": {"torch": "2.13.0+cpu", "numpy": "2.4.6"},
        "git": "0123456789abcdef0123456789abcdef01234567",
        "config": {"attention": LONG, "seeds": 3, "steps": 4000, "workers": 2},
    }


def every_page() -> dict[str, str]:
    """Return the pages by name."""
    long_audit = many_probes(f"recipe:{LONG}", DEFECT)
    audits = [many_probes("sdpa:flash", DEFECT), long_audit, SOUND, STOCK, ERROR]
    isolated = ladder()
    numbers = [[f"a kernel {i}", 1.5 * i, None, 3e-7, "+109.0 … +110.0"] for i in range(9)]
    table = {
        "title": "Speed",
        "columns": [
            "kernel",
            "ms",
            "share of the peak",
            "over the floor",
            "σ(W_Q) at the end",
        ],
        "rows": numbers,
        "caption": "Medians.",
        "command": COMMAND,
    }
    acts = [
        {
            "number": 1,
            "title": "The failure",
            "finding": f"PyTorch flash ruins the training; {LONG} survives.",
            "seconds": 30.0,
            "text": ["One causal attention layer learns a random teacher."],
            "figures": [curves("PyTorch flash", "halfulp"), curves("a", "b", title="Mean score")],
            "tables": [table],
        },
        {
            "number": 2,
            "title": "The cause",
            "finding": isolated["verdict"],
            "seconds": 60.0,
            "figures": isolated["figures"],
            "tables": isolated["tables"],
            "code": [{"caption": "Bit by bit.", "text": "x" * 120, "command": COMMAND}],
        },
        {
            "number": 3,
            "title": "The audit",
            "finding": "Of 5 kernels found here, 2 have a defect.",
            "seconds": 60.0,
            "audits": audits,
            "skipped": {"flash_attn": "is not installed"},
            "command": COMMAND,
        },
    ]
    claim = {
        "id": "A9",
        "statement": "alike",
        "paper": "above 0.9",
        "measured": "0.93 … 0.97",
        "rule": "reproduced where the least is above 0.8",
        "history": "",
        "estimates": "share 1 [0.29, 1] (n = 3)",
        "source": "papers",
        "verdict": "reproduced at reduced scale",
        "command": COMMAND,
        "seconds": 1.0,
        "pictures": [heat_map(), curves("a", "b", style="bar"), picture()],
    }
    seen = {"figures": [curves(*"abcdefgh"), curves(LONG, style="row")], "tables": [table]}
    compared = seen | {
        "summary": [{"name": LONG, "max_difference": 0.5, "wasserstein": 0.1, "steps": 100}],
        "command": COMMAND,
    }
    sections = [
        training_section(seen, f"{LONG} fails at step 1450.", [picture()]),
        record_section(f"runs/{LONG}", record() | {"resumed": []}),
    ]
    return {
        "demo": demo_page(record(), acts),
        "audit": audit_page(audits[:1], COMMAND),
        "audits": audit_page(audits, COMMAND, meta="today"),
        "run": run_page(sections, [LONG], COMMAND, "halfulp 0.1.0"),
        "compare": compare_page(compared, [picture()]),
        "isolation": trial_page(isolated),
        "ledger": ledger_page([claim, claim | {"id": "A10", "pictures": []}], COMMAND),
        "experiment": experiment_page("Sweep of precision", seen["figures"], seen["tables"]),
    }
