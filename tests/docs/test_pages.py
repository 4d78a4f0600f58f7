"""README.md and docs/: links lead somewhere, code blocks run, figures are those of bench/results."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from graphcap import cli

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TUNING = (ROOT / "docs" / "tuning.md").read_text()


@cache
def text_of(page: Path) -> str:
    """The page without its code blocks, in which a # is no heading and brackets are no link."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    titles = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert len(set(slugs)) == len(slugs), f"{page.name}: two headings have one anchor"
    return frozenset(slugs)


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            if "://" not in target:
                yield page, target


def test_links_and_anchors_lead_somewhere():
    count = 0
    for page, target in links():
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert found.is_relative_to(ROOT)
        if anchor:
            assert anchor in anchors_of(found), f"{page.name} links to {target}"
        count += 1
    assert count >= 60


def test_every_page_is_reached_from_the_readme():
    named = {(ROOT / t.partition("#")[0]).resolve() for p, t in links() if p.name == "README.md"}
    assert set(PAGES[1:]) <= named


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, code)
        for page in PAGES
        for code in re.findall(
            rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
    ]


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_blocks_run(page: str, code: str):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def commands() -> list[tuple[str, str]]:
    """Lines of sh blocks that begin with graphcap or python, on whatever path."""
    lines = [(page, line) for page, code in blocks("sh") for line in code.splitlines()]
    return [(p, c) for p, c in lines if re.match(r"(\S*/)?(graphcap|python)\s", c)]


NEEDS_A_SERVER_OR_A_FILE = {"top", "plan", "report"}


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_run(page: str, command: str, monkeypatch: pytest.MonkeyPatch):
    program, *words = shlex.split(command.partition(" > ")[0], comments=True)
    if program.endswith("python"):
        if words[0] == "-m":  # a tool of its own: is it there?
            assert words[1] in ("pytest", "graphcap")
            for path in (w for w in words[2:] if "/" in w and not w.startswith("-")):
                assert (ROOT / path).exists(), f"{page}: {command}"
        else:
            assert (ROOT / words[0]).is_file(), f"{page}: {command}"
        return
    parser = cli._parser()
    with monkeypatch.context() as patched:
        # What argparse does not know ends the process; here it is the test that ends.
        patched.setattr(cli._Parser, "error", lambda self, message: pytest.fail(message))
        parser.parse_args(words)
    if (
        words[0] not in NEEDS_A_SERVER_OR_A_FILE
        and "--vllm" not in words
        and "--checkpoint" not in words
    ):
        assert cli.main(words) == 0, f"{page}: {command}"


def test_there_are_commands_of_each_kind():
    words = {shlex.split(command, comments=True)[1] for _, command in commands()}
    assert {"top", "doctor", "census", "explain"} <= words


# -- figures -------------------------------------------------------------------------------------


def result(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def said(*pieces: str) -> None:
    flat = " ".join(TUNING.split())
    for piece in pieces:
        assert piece in flat, f"docs/tuning.md does not say {piece!r}"


def test_figures_of_the_decode_step():
    speed = result("speed_seed-64_h200.json")
    said(f"{speed['layers']} layers, {speed['weights_gib']:.0f} GiB of weights")
    rows = {r["batch"]: r["ways"] for r in speed["rows"] if r["context"] == speed["context"]}
    ours = {batch: ways["graphcap"] for batch, ways in rows.items()}
    one, eight, most = (f"{ours[n]['ms']:.2f}" for n in (1, 8, 32))
    said(f"Replays of 1, 8 and 32 rows took {one}, {eight} and {most} ms.")
    said(f"{rows[1]['eager']['ms']:.2f} ms beside {one} ms for one row")
    said(f"took the host {ours[1]['host_us']:.1f} µs while the device was busy")
    said(f"and {ours[1]['host_us_after_idle']:.1f} µs after both were idle")
    capture = speed["capture"][0]
    assert (capture["schedule"], capture["context"]) == (speed["schedules"][0], speed["context"])
    times = [way["capture_ms"] for way in ours.values()]
    sizes = [way["graph_mib"] for way in ours.values()]
    assert len(times) == 7
    said(f"took between {min(times):.0f} and {max(times):.0f} ms")
    said(f"and {min(sizes):.0f} to {max(sizes):.0f} MiB; all seven")
    said(f"warm-up and verification, {capture['seconds']:.1f} s")
    assert f"{capture['pool_mib']:.2f}" == f"{capture['pool_lower_bound_mib']:.2f}"
    said(f"{capture['pool_mib']:.2f} MiB up to {max(ours)} rows, equal to its lower bound")


def test_figures_of_tuned_plans():
    table = json.loads((ROOT / "graphcap" / "tuning" / "tables" / "h200_seed-64.json").read_text())
    said(f"H200 with the shape `{table['shape']}`")
    rows = {bucket["rows"]: bucket for bucket in table["buckets"] if bucket["context"] == 256}
    for bucket in (rows[1], rows[8], rows[32]):
        times = (f"{bucket[name]:.3f}" for name in ("plain_ms", "default_ms", "ms"))
        assert bucket["layers"] == 12
        said(f"| {bucket['rows']} | {' | '.join(times)} |")
    assert {"CudaRows", "CudaAttend", "CudaGateUp", "CudaDown"} == {
        tile["tile"] for tile in rows[1]["plan"]["tiles"].values() if "Cuda" in tile["tile"]
    }
    said(
        f"{rows[1]['ms']:.3f} ms by the plan of the table",
        f"{rows[1]['default_ms']:.3f} ms by rule",
    )


def test_figures_of_the_soak():
    soak = result("soak_tiny_h200.json")
    page = " ".join((ROOT / "docs" / "measurements.md").read_text().split())
    checked, grown = soak["checked"], soak["grown"]
    assert (checked["steps"], soak["differing"]) == (checked["bitwise equal steps"], 0)
    assert (grown["tensors"], grown["allocated"], grown["reserved"]) == (0, 0, 0)
    memcheck = (ROOT / "bench" / "results" / "memcheck_tiny_h200.log").read_text()
    assert re.findall(r"ERROR SUMMARY: (\d+) errors", memcheck) == ["0", "0"]
    for piece in (
        f"replayed {soak['replays']:,} steps",
        f"all {checked['steps']:,} steps that were held against eager were bitwise equal",
        f"the process by {grown['resident'] / 2**10:.0f} KiB",
    ):
        assert piece in page, f"docs/measurements.md does not say {piece!r}"


def test_figures_under_vllm():
    modes = {mode["mode"]: mode for mode in result("vllm_seed-64_h200.json")["modes"]}
    ours, default = modes["graphcap"], modes["default"]
    said(f"all graphs together took {ours['graph_gib']} GiB")
    said(f"those of vLLM's default took {default['graph_gib']} GiB")
    said(f"came after {ours['mixed']['ttft_p99_ms']:.0f} ms at the 99th percentile")
    said(f"and after {default['mixed']['ttft_p99_ms']:,.0f} ms with vLLM's default")
    start = {m["mode"]: m["ready_s"] for m in result("vllm_start_seed-64_h200.json")["modes"]}
    said(f"{start['graphcap']:.1f} s, and {start['default']:.1f} s with vLLM's default")
    (flash,) = result("vllm_seed-64_flash_h200.json")["modes"]
    said(f"with FlashAttention 3 they took {flash['graph_gib']} GiB")
    one, eight, most = (f"{flash['batches'][n]['ms']:.2f}" for n in ("1", "8", "32"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{one}, {eight} and {most} ms at batch 1, 8 and 32, its graphs 2.32 GiB" in readme
    equal = {m["mode"]: m for m in result("parity_qwen3-moe_h200.json")["modes"]}
    count = {name: mode["requests_equal"] for name, mode in equal.items()}
    said(f"Of {equal['default']['requests']} requests beside eager vLLM")
    with_vllms = count["graphcap, vLLM's kernels"]
    said(f"{with_vllms} were equal to the end with vLLM's kernels")
    said(f"and {count['graphcap']} with graphcap's")
    said(f"compiled default had {count['default']}")


def test_figures_of_the_answer_whether_to_use_it():
    readme = " ".join((ROOT / "README.md").read_text().split())
    answer = readme.split("### Should you use it?")[1].split("### ")[0]
    modes = {mode["mode"]: mode for mode in result("vllm_seed-64_h200.json")["modes"]}
    ours, default = modes["graphcap"], modes["default"]
    cold = {m["mode"]: m["ready_s"] for m in result("vllm_start_seed-64_h200.json")["modes"]}
    eager = {m["mode"]: m for m in result("vllm_eager_seed-64_h200.json")["modes"]}
    same = {m["mode"]: m for m in result("parity_qwen3-moe_h200.json")["modes"]}

    def ms(mode: Any, batch: int) -> str:
        return f"{mode['batches'][str(batch)]['ms']:.2f}"

    buckets = re.findall(r"(\d+) buckets of", " ".join(ours["graphcap"]))
    assert buckets == ["17", "7"]
    assert same["graphcap, vLLM's kernels"]["requests_equal"] == 64
    for piece in (
        f"a step took {ms(ours, 1)} and {ms(ours, 8)} ms, and {ms(default, 1)} and {ms(default, 8)} ms "
        "with vLLM's default",
        f"the first token came after {ours['mixed']['ttft_p99_ms']:.0f} ms at the 99th percentile, and "
        f"after {default['mixed']['ttft_p99_ms']:,.0f} ms with vLLM's default",
        f"about even** ({ms(ours, 32)} and {ms(default, 32)} ms)",
        f"{ours['graph_gib']} GiB of graphs (vLLM's default: {default['graph_gib']} GiB)",
        f"{cold['graphcap']:.1f} s from weights to ready (vLLM's default: {cold['default']:.1f} s",
        "seven decode buckets and 17 mixed ones",
        f"a step of one sequence took {ms(eager['tape'], 1)} ms, in eager vLLM {ms(eager['eager'], 1)} ms",
        "all of [64 requests]",
    ):
        assert piece in answer, f"README.md does not say {piece!r}"
    assert modes["decode-only"]["ready_s"] < ours["ready_s"], "vLLM is ready sooner uncompiled"


def test_figures_of_the_tape():
    cpu = result("cpu_qwen3-moe.json")
    (one,) = (row for row in cpu["batches"] if row["batch"] == 1)
    ours, eager, default = (f"{one[m]['step_ms']:.2f}" for m in ("graphcap", "eager", "default"))
    said(f"one sequence took {ours} ms, {eager} ms in eager vLLM and {default} ms in its compiled")
    said(f"({cpu['layers']} layers, hidden {cpu['shape']['hidden_size']})")
    said(f"on {cpu['machine']['cpus']} cores")
