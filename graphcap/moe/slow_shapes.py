"""Shapes on which a kernel is silently slow: no tuned configuration, or off the kernel's alignment.

Nothing here runs a kernel or imports torch or an engine: each rule is a condition that the kernel's own
dispatch has, with its source. Where a rule is not published, the finding is *not known*.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphcap.errors import InputError

BACKENDS = ("triton", "vllm", "ixformer", "mlx")
ALIGNED, UNALIGNED = "aligned", "unaligned"
TUNED, UNTUNED = "tuned", "untuned"
NOT_KNOWN, NOT_INSTALLED = "not known", "not installed"
SLOW = (UNALIGNED, UNTUNED)
"""Verdicts that name a shape which runs, and more slowly than it could."""

MLX_ALIGNMENT = {2: 512, 3: 512, 4: 512, 5: 512, 6: 256, 8: 256}
"""Bits of a weight -> what K must be a multiple of for the fast kernel of gather_qmv: 32 lanes times the
weights that one lane unpacks at a time, in `qmv_fast_impl` of MLX's metal/kernels/quantized.h."""
MLX_STRICTEST = max(MLX_ALIGNMENT.values())
"""What the dispatch of some versions of MLX asks for whatever the width."""
MLX_ROWS = 8
"""And N of this, in `qmv` and `gather_qmv` of MLX's metal/quantized.cpp."""

_VLLM_CONFIGS = ("model_executor", "layers", "fused_moe", "configs")
_VLLM_NAME = re.compile(r"E=(\d+),N=(\d+),device_name=([^,]+)(?:,(.+))?\.json")


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a model, as a kernel of one rank sees them.

    Attributes:
        name: for messages.
        num_experts: E.
        top_k: K experts a token.
        hidden_size: H.
        moe_intermediate_size: I of one expert, whole.
        tp: tensor-parallel ranks that share each expert's I.

    Raises:
        InputError: the model has no experts or fewer than K, or I cannot be shared evenly.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    tp: int = 1

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise InputError(f"{self.name} has no experts; name a mixture-of-experts model")
        if not 1 <= self.top_k <= self.num_experts:
            raise InputError(
                f"{self.name}: expected 1 to {self.num_experts} experts a token, as many as it has, found "
                f"{self.top_k}; correct its config.json"
            )
        if self.moe_intermediate_size % self.tp:
            raise InputError(
                f"--tp {self.tp}: expected a divisor of {self.name}'s expert intermediate size, "
                f"{self.moe_intermediate_size}; engines refuse the others"
            )

    @property
    def inner(self) -> int:
        """I of one rank."""
        return self.moe_intermediate_size // self.tp


@dataclass(frozen=True)
class Finding:
    """What is known of one kernel on one shape.

    Attributes:
        backend: of `BACKENDS`.
        what: the kernel, its sizes, and for which batches.
        verdict: one of the words above.
        detail: why, and what can be done.
    """

    backend: str
    what: str
    verdict: str
    detail: str


def mlx_findings(shape: ExpertShape, bits: int | None = None) -> list[Finding]:
    """Both products of an expert under MLX's gather_qmv, for one width of weights or for all.

    Raises:
        InputError: MLX does not quantise to `bits`.
    """
    if bits is not None and bits not in MLX_ALIGNMENT:
        accepted = ", ".join(map(str, MLX_ALIGNMENT))
        raise InputError(
            f"--bits {bits}: expected one of {accepted}, the widths that MLX quantises to"
        )
    widths = [bits] if bits else list(MLX_ALIGNMENT)
    findings = []
    for product, k, n in (
        ("gate and up", shape.hidden_size, shape.inner),
        ("down", shape.inner, shape.hidden_size),
    ):
        for multiple in sorted({MLX_ALIGNMENT[width] for width in widths}, reverse=True):
            at = ", ".join(str(width) for width in widths if MLX_ALIGNMENT[width] == multiple)
            findings.append(_mlx_finding(f"{product}, K {k}, N {n}, {at} bits", k, n, multiple))
    return findings


def _mlx_finding(what: str, k: int, n: int, multiple: int) -> Finding:
    if k % multiple == 0 and n % MLX_ROWS == 0:
        detail = f"gather_qmv's fast kernel: K is a multiple of {multiple}"
        if k % MLX_STRICTEST:
            detail += (
                f" (an MLX that asks for {MLX_STRICTEST} at every width takes the general one)"
            )
        return Finding("mlx", what, ALIGNED, detail)
    misses = []
    if k % multiple:
        misses.append(f"K is no multiple of {multiple}")
    if n % MLX_ROWS:
        misses.append(f"N is no multiple of {MLX_ROWS}")
    others = [width for width, needed in MLX_ALIGNMENT.items() if k % needed == 0]
    cure = (
        f"; {' or '.join(map(str, others))} bits have the fast one"
        if others and n % MLX_ROWS == 0
        else "; no width of weights has the fast one"
    )
    return Finding(
        "mlx", what, UNALIGNED, f"gather_qmv's general kernel: {' and '.join(misses)}{cure}"
    )


def ixformer_findings(shape: ExpertShape, version: str | None) -> list[Finding]:
    """What is published of ixformer's fused MoE kernel, which is its block sizes and no more.

    Args:
        version: of the installed package; None: not installed.
    """
    what = f"fused MoE, E {shape.num_experts}, H {shape.hidden_size}, I {shape.inner}"
    here = "" if version else "ixformer is not installed here; "
    return [
        Finding(
            "ixformer",
            what,
            NOT_KNOWN,
            f"{here}vllm_invoke_fused_moe_kernel takes a block size and no tuned configuration; "
            f"graphcap gives 32 up to 64 pairs of a token and an expert ({64 // shape.top_k} tokens here), "
            f"64 up to 1024 ({1024 // shape.top_k} tokens), 256 above. Its alignment of H and I is not "
            f"published; measure",
        )
    ]


def vllm_config_name(experts: int, inner: int, device_name: str, suffix: str | None = None) -> str:
    """The file in which vLLM's Triton kernel looks for its configuration.

    As `get_config_file_name` of vLLM 0.26 to 0.33: white space and slashes of the device's name become
    underscores, and every card of the H200 family is ``NVIDIA_H200``.

    Args:
        inner: N, the expert intermediate size of one rank.
        suffix: such as ``dtype=fp8_w8a8`` or ``dtype=fp8_w8a8,block_shape=[128,128]``; None:
            unquantised weights.
    """
    name = re.sub(r"[\s/]+", "_", device_name.strip())
    if "H200" in name.split("_"):
        name = "NVIDIA_H200"
    end = f",{suffix}" if suffix else ""
    return f"E={experts},N={inner},device_name={name}{end}.json"


def vllm_findings(
    shape: ExpertShape,
    package: Path | None,
    device_name: str | None,
    tuned_folder: Path | None = None,
) -> list[Finding]:
    """Whether vLLM's Triton kernel has a configuration that was tuned for these experts.

    Args:
        package: the folder of the installed vllm; None: not installed.
        device_name: the card's, as torch gives it; None: no card here.
        tuned_folder: VLLM_TUNED_CONFIG_FOLDER, where vLLM looks first.
    """
    what = f"fused_moe, E {shape.num_experts}, N {shape.inner}"
    if package is None:
        return [Finding("vllm", what, NOT_INSTALLED, "vLLM is not installed for this Python")]
    folder = package.joinpath(*_VLLM_CONFIGS)
    folders = [place for place in (tuned_folder, folder) if place is not None and place.is_dir()]
    if not folder.is_dir():
        return [
            Finding("vllm", what, NOT_KNOWN, f"this vLLM has no folder {'/'.join(_VLLM_CONFIGS)}")
        ]
    there = _vllm_files(folders, shape)
    plain = sorted({device for device, suffix in there if not suffix})
    elsewhere = (
        f"tuned for these sizes: {', '.join(plain)}"
        if plain
        else "no card is tuned for these sizes"
    )
    if device_name is None:
        detail = f"no CUDA device here; ask for a card with --device-name ({elsewhere})"
        return [Finding("vllm", what, NOT_KNOWN, detail)]
    wanted = vllm_config_name(shape.num_experts, shape.inner, device_name)
    path = next((place / wanted for place in folders if (place / wanted).is_file()), None)
    if path is None:
        detail = (
            f"vLLM falls back to its default configuration: there is no {wanted} ({elsewhere}); tune "
            f"with vLLM's benchmarks/kernels/benchmark_moe.py --tune, and put the file into "
            f"VLLM_TUNED_CONFIG_FOLDER"
        )
        findings = [Finding("vllm", f"{what}, unquantised", UNTUNED, detail)]
    else:
        findings = [_tuned(f"{what}, unquantised", path)]
    card = vllm_config_name(0, 0, device_name).split("device_name=")[1].removesuffix(".json")
    for suffix in sorted(suffix for device, suffix in there if device == card and suffix):
        findings.append(_tuned(f"{what}, {suffix}", there[card, suffix]))
    return findings


def _vllm_files(folders: Sequence[Path], shape: ExpertShape) -> dict[tuple[str, str], Path]:
    """(device, suffix) -> the file for these experts; the first folder wins."""
    found: dict[tuple[str, str], Path] = {}
    for folder in folders:
        for path in folder.iterdir():
            match = _VLLM_NAME.fullmatch(path.name)
            if match and (int(match[1]), int(match[2])) == (shape.num_experts, shape.inner):
                found.setdefault((match[3], match[4] or ""), path)
    return found


def _tuned(what: str, path: Path) -> Finding:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        sizes = sorted(int(size) for size in content if size != "triton_version")
    except (OSError, ValueError) as error:
        return Finding("vllm", what, UNTUNED, f"{path.name} cannot be read: {error}")
    if not sizes:
        return Finding("vllm", what, UNTUNED, f"{path.name} has no batch size")
    count = f"{len(sizes)} batch sizes" if len(sizes) > 1 else "one batch size"
    return Finding(
        "vllm",
        what,
        TUNED,
        f"{path.name}: {count} from {sizes[0]} to {sizes[-1]}, the nearest is taken",
    )
