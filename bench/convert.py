"""Converts a checkpoint to 4 bit with this program and with mlx_lm.convert, in turns, and compares
seconds and memory. Each conversion is a process of its own; its peak is the kernel's VmHWM, from
which what the interpreter takes with mlx imported is subtracted. The checkpoint is made for it:
random weights in the published shapes of a size, with fewer layers, and pocket's tokenizer.

    python bench/convert.py --size 31B --layers 6 --repeat 1

The last line of stdout is one JSON document. Linux alone: it reads /proc.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from made_checkpoints import target_tensors, write_checkpoint
from published import SIZES

from mlx_mtp.hub import BUNDLED

ENGINES = {
    "ours": """
import mlx_mtp.convert as package
package.convert(sys.argv[1], sys.argv[2], package.Options(bits=4), drafter=None, verify=False)
""",
    "mlx-lm": """
import mlx_lm
mlx_lm.convert(sys.argv[1], sys.argv[2], quantize=True, q_bits=4, q_group_size=64)
""",
}
MEASURED = """
import sys, time
from pathlib import Path
import mlx.core as mx
mx.eval(mx.quantize(mx.ones((64, 64))))
def high():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
bare, began = high(), time.perf_counter()
{engine}
print(f"\\n{{time.perf_counter() - began}} {{high() - bare}}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="31B")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.folder) as folder:
        target = make_checkpoint(Path(folder) / "target", options.size, options.layers)
        source_bytes = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        print(f"{options.size} with {options.layers} layers: {source_bytes / 1e9:.2f} GB")
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in options.engines}
        for _ in range(options.repeat):
            for name in options.engines:
                runs[name].append(measure(name, target, Path(folder) / "out"))
                seconds, peak = runs[name][-1]
                print(f"{name:7} {seconds:7.1f} s  {peak / 1e6:7.0f} MB over the bare interpreter")
    document: dict[str, Any] = {
        "size": options.size,
        "layers": options.layers,
        "source_bytes": source_bytes,
        "engines": {
            name: {
                "seconds": [round(seconds, 2) for seconds, _ in found],
                "median_seconds": round(statistics.median(s for s, _ in found), 2),
                "peak_bytes": max(peak for _, peak in found),
            }
            for name, found in runs.items()
        },
    }
    print(json.dumps(document))


def make_checkpoint(folder: Path, size: str, layers: int) -> Path:
    """A target with the first layers of a size, the last of them a full one, and a tokenizer."""
    config = copy.deepcopy(SIZES[size][0])
    text = config["text_config"]
    text["num_hidden_layers"] = layers
    text["layer_types"] = [*text["layer_types"][: layers - 1], "full_attention"]
    text["num_kv_shared_layers"] = max(0, min(text["num_kv_shared_layers"], layers - 6))
    tensors = target_tensors(config)
    write_checkpoint(folder, config, tensors, data=True, shard_bytes=5 * 10**9)
    for file in BUNDLED["pocket"].glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def measure(name: str, target: Path, out: Path) -> tuple[float, int]:
    """Seconds, and bytes at the peak over those of the interpreter with mlx."""
    code = MEASURED.format(engine=ENGINES[name])
    done = subprocess.run(
        [sys.executable, "-c", code, str(target), str(out)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} failed.")
    shutil.rmtree(out)
    seconds, peak = done.stdout.strip().splitlines()[-1].split()
    return float(seconds), int(peak)


if __name__ == "__main__":
    main()
