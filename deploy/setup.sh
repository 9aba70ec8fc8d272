#!/bin/sh
# setup.sh: everything that `make demo` and `make test` need on a fresh Debian 12 or 13 machine.
#
#   .venv/                    virtual environment with the pinned packages of deploy/requirements*.txt
#   etcd, python3-venv        from the distribution, if missing (needs root)
#   /opt/dynamo-elastic/criu  a CRIU that works on this kernel, if there is none (needs root)
#
# Safe to run again: what is there already is left alone.
set -eu
cd "$(dirname "$0")/.."
say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }
root() { [ "$(id -u)" = 0 ]; }

apt_install() {
  root || die "missing: $*. Run once as root, or install them: apt-get install $*"
  say "installing from the distribution: $*"
  export DEBIAN_FRONTEND=noninteractive
  # RUNLEVEL=1 keeps the packages' services from being started: we run our own etcd.
  RUNLEVEL=1 apt-get -qq -y install --no-install-recommends "$@" >/dev/null 2>&1 ||
    { apt-get -qq update && RUNLEVEL=1 apt-get -qq -y install --no-install-recommends "$@" >/dev/null; } ||
    die "apt-get could not install $*"
}

missing=
command -v python3 >/dev/null || missing="$missing python3"
python3 -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
[ -x "$(command -v etcd || echo /usr/bin/etcd)" ] || missing="$missing etcd-server"
# For the fault matrix, which only root can play.
if root; then
  for tool in ip:iproute2 nft:nftables strace:strace; do
    [ -n "$(PATH="$PATH:/usr/sbin:/sbin" command -v "${tool%:*}")" ] || missing="$missing ${tool#*:}"
  done
  [ -n "$(ls /usr/lib/*/faketime/libfaketime.so.1 2>/dev/null)" ] || missing="$missing libfaketime"
fi
for tool in nsenter unshare; do command -v $tool >/dev/null || missing="$missing util-linux"; done
# shellcheck disable=SC2086 # a list of names
[ -z "$missing" ] || apt_install $missing
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python >= 3.11 is needed"

stamp=.venv/.requirements
if ! cat deploy/requirements.txt deploy/requirements-dev.txt | cmp -s - "$stamp"; then
  say "creating .venv (about 2 GB, a few minutes)"
  python3 -m venv .venv
  .venv/bin/python -m pip install -q --upgrade pip
  # torch may be a CUDA build, whose libraries are packages of their own: it alone brings its needs.
  .venv/bin/python -m pip install -q -c deploy/requirements.txt "$(grep ^torch== deploy/requirements.txt)"
  .venv/bin/python -m pip install -q --no-deps -r deploy/requirements.txt -r deploy/requirements-dev.txt
  # setuptools warns that folders here may shadow packages; import-linter and ruff watch over that.
  .venv/bin/python -W ignore -m pip install -q --no-deps --no-build-isolation -e . 2>.venv/install.log ||
    { cat .venv/install.log >&2; die "the package itself could not be installed"; }
  .venv/bin/python -c "import site, pathlib; pathlib.Path(site.getsitepackages()[0], 'dynamo_elastic_stubs.pth').write_text('$PWD/deploy/stubs\n')"
  cat deploy/requirements.txt deploy/requirements-dev.txt >"$stamp"
fi

if root; then
  sh deploy/criu/install.sh >/dev/null || say "no working CRIU: joiners will boot cold, tests that need it are skipped"
else
  say "not root: no CRIU, no snapshots. Joiners boot cold, and the tests that need root are skipped"
fi
