#!/bin/sh
# vllm-elastic-cpu.sh: .venv-vllm-elastic/, a third virtual environment: vLLM 0.33's own Python on the CPU,
# without a model that it could serve, for tests of elastic expert parallelism (marker `vllm_elastic`).
# About 3 GB, and a wheel of some 340 MB of which only the Python is kept. Safe to run again.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-vllm-elastic
stamp=$venv/.requirements
if cmp -s deploy/vllm-elastic-cpu.txt "$stamp"; then exit 0; fi
echo "vllm-elastic-cpu: creating $venv (about 3 GB, some 8 minutes)" >&2
python3 -m venv $venv
python=$venv/bin/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The shared pins, but for the names that this environment has its own of.
pin() { grep "^$1==" deploy/vllm-elastic-cpu.txt; }
names=$(sed -n 's/^\([A-Za-z0-9_-]*\)==.*/\1/p' deploy/vllm-elastic-cpu.txt)
cp deploy/vllm-cpu.txt "$scratch/pins.txt"
for name in $names; do sed -i "/^$name==/d" "$scratch/pins.txt"; done
for name in $names; do [ "$name" = vllm ] || pin "$name" >>"$scratch/pins.txt"; done
$python -m pip install -q --upgrade pip
$python -m pip install -q -c "$scratch/pins.txt" "$(grep ^torch== "$scratch/pins.txt")"
$python -m pip install -q --no-deps -r "$scratch/pins.txt"
$python -W ignore -m pip install -q --no-deps --no-build-isolation -e . 2>$venv/install.log ||
  { cat $venv/install.log >&2; echo "vllm-elastic-cpu: the package itself could not be installed" >&2; exit 1; }
$python -m pip download -q --no-deps -d "$scratch" "$(pin vllm)"
# vLLM chooses its CPU platform by the word "cpu" in its distribution's version.
$python - "$scratch" "$(pin vllm)" <<'PYTHON'
import pathlib, shutil, site, sys, zipfile
scratch, pin = pathlib.Path(sys.argv[1]), sys.argv[2]
packages = pathlib.Path(site.getsitepackages()[0])
compiled = {p.relative_to(packages): p.read_bytes() for p in (packages / "vllm").rglob("*.so")}
shutil.rmtree(packages / "vllm")
(wheel,) = scratch.glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if name.startswith("vllm/") and name.endswith((".py", ".json", ".jinja")):
            archive.extract(name, packages)
for path, content in compiled.items():
    (packages / path).parent.mkdir(parents=True, exist_ok=True)
    (packages / path).write_bytes(content)
told = f"{pin.partition('==')[2]}+cpu"
stand_in = packages / f"vllm-{told}.dist-info"
stand_in.mkdir(exist_ok=True)
(stand_in / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {told}\n")
PYTHON
cp deploy/vllm-elastic-cpu.txt "$stamp"
