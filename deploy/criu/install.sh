#!/bin/sh
# Prints the path of a CRIU >= 4.2 that dumps and restores a process with a TCP listener; installs
# one if this machine has none. `criu check` is not asked: it says "Looks good" of versions that
# can't dump a socket on newer kernels.
#
#   deploy/criu/install.sh [PREFIX]        default /opt/dynamo-elastic/criu
#
# What it installs is Debian's package with its own loader and libraries, all of it in PREFIX: the
# machine's libc, packages and apt state are not touched, and signatures are verified. Only the path
# goes to stdout. Runs of one PREFIX exclude each other; a run with nothing to do takes a second.
#
#   DEBIAN_MIRROR  archive to use where the machine's own apt sources name none (not Debian)
#   CRIU_SUITE     Debian suite that has CRIU >= 4.2 (default forky)
#   CRIU_TRIAL=no  believe the version: where nothing can be dumped, in the build of an image
set -eu
umask 022

PREFIX=${1:-/opt/dynamo-elastic/criu}
SUITE=${CRIU_SUITE:-forky}
MINIMUM=4.2
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

say() { echo "criu/install.sh: $*" >&2; }
die() {
    say "$*"
    exit 1
}

version_of() { "$1" --version 2>/dev/null | sed -n 's/^Version: *//p'; }

# First error of a CRIU log; that it can't raise a limit on open files is not one.
first_error() { grep Error "$1" 2>/dev/null | grep -v RLIMIT_NOFILE | head -n 1; }

new_enough() {
    [ -n "$1" ] && [ "$(printf '%s\n%s\n' "$MINIMUM" "$1" | sort -V | head -n 1)" = "$MINIMUM" ]
}

# Dump and restore one process that listens on TCP. Every process and file of it is gone after.
dumps_and_restores() {
    (
        criu=$1
        dir=$(mktemp -d)
        victim=
        # The victim is killed by its pid file, or, before the dump, by the pid we started.
        trap '[ -z "$victim" ] || kill -9 "$victim" 2>/dev/null || true; rm -rf "$dir"' EXIT
        setsid python3 -I -S -c '
import os, socket, sys, time
os.closerange(3, 1024)  # what our caller left open (a lock, say) is not what is tested
s = socket.socket()
s.bind(("127.0.0.1", 0))
s.listen()
open(sys.argv[1], "w").close()
while True:
    time.sleep(1)' "$dir/listening" </dev/null >/dev/null 2>&1 9>&- &
        victim=$!
        tries=0
        while [ ! -e "$dir/listening" ]; do
            tries=$((tries + 1))
            [ "$tries" -lt 200 ] || { say "the test process did not start"; exit 1; }
            sleep 0.05
        done
        "$criu" dump --tree "$victim" --images-dir "$dir" --log-file dump.log -v1 \
            </dev/null >/dev/null 2>&1 9>&- ||
            { say "$criu can't dump a TCP listener: $(first_error "$dir/dump.log")"; exit 1; }
        wait "$victim" 2>/dev/null || true # until it is reaped, its pid is taken
        victim=
        "$criu" restore --images-dir "$dir" --log-file restore.log -v1 --restore-detached \
            --pidfile "$dir/pid" </dev/null >/dev/null 2>&1 9>&- ||
            { say "$criu can't restore a TCP listener: $(first_error "$dir/restore.log")"; exit 1; }
        victim=$(cat "$dir/pid")
        kill -0 "$victim"
    )
}

# Ends the script with the path of $1 if that CRIU works here.
use_if_works() {
    [ -x "$1" ] || return 0
    found=$(version_of "$1")
    if ! new_enough "$found"; then
        say "$1 is CRIU ${found:-of unknown version}, $MINIMUM is needed"
    elif [ "${CRIU_TRIAL:-}" = no ] || dumps_and_restores "$1"; then
        say "using $1 (CRIU $found)"
        echo "$1"
        exit 0
    fi
}

mirror() {
    if [ -n "${DEBIAN_MIRROR:-}" ]; then
        echo "$DEBIAN_MIRROR"
        return
    fi
    # shellcheck source=/dev/null
    . /etc/os-release
    [ "${ID:-}" = debian ] || return 0
    # Expanded by apt, not by the shell.
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v suite="$VERSION_CODENAME" '$2 == suite && $3 == "main" { print $1; exit }'
}

# The archive's public keys: those of this machine, else out of the package that holds them, which
# the machine's own apt verifies.
keyring() {
    if [ -s "$KEYRING" ]; then
        echo "$KEYRING"
        return
    fi
    mkdir -p "$NEW/keys"
    (cd "$NEW/keys" && apt-get -q download debian-archive-keyring >&2 &&
        dpkg-deb -x debian-archive-keyring_*.deb .) ||
        die "no $KEYRING, and apt can't fetch package debian-archive-keyring; run apt-get update"
    echo "$NEW/keys$KEYRING"
}

# An apt of our own: the machine's transport settings (proxy, TLS), and nothing else of it. Its
# empty package state makes it fetch every library down to libc.
configure_apt() {
    mkdir -p "$APT/lists/partial" "$APT/cache/archives/partial"
    : >"$APT/status"
    apt-config dump Acquire >"$APT/apt.conf"
    cat >>"$APT/apt.conf" <<CONF
APT::Architecture "$(dpkg --print-architecture)";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
APT::Get::AllowUnauthenticated "false";
Acquire::AllowInsecureRepositories "false";
Acquire::Languages "none";
Acquire::Retries "3";
Dir::State "$APT";
Dir::State::lists "$APT/lists";
Dir::State::status "$APT/status";
Dir::Cache "$APT/cache";
Dir::Log "$APT";
Dir::Etc::sourcelist "$APT/criu.sources";
CONF
    for part in main parts sourceparts trusted trustedparts preferences preferencesparts; do
        echo "Dir::Etc::$part \"/dev/null\";" >>"$APT/apt.conf"
    done
    cat >"$APT/criu.sources" <<SOURCES
Types: deb
URIs: $1
Suites: $SUITE
Components: main
Signed-By: $2
SOURCES
}

fetch() {
    APT_CONFIG=$APT/apt.conf
    export APT_CONFIG
    apt-get -q update >&2 || true # what counts is whether lists came that verified
    ls "$APT"/lists/*_Packages* >/dev/null 2>&1 ||
        die "$SUITE could not be fetched from $1, or its signature does not verify with $2"
    apt-get -qq -y --download-only install criu >&2 || die "apt can't fetch criu of $SUITE"
    unset APT_CONFIG
}

unpack() {
    mkdir -p "$NEW/root" "$NEW/bin"
    for package in "$APT"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$NEW/root"
    done
    (cd "$APT/cache/archives" && sha256sum -- *.deb) >"$NEW/SHA256SUMS"
    rm -rf "$NEW/root/usr/share"
    libraries=$(cd "$NEW/root" && echo usr/lib/*-linux-gnu*)
    loader=$(cd "$NEW/root/$libraries" && echo ld-linux*.so.*)
    # By its own loader, never by LD_LIBRARY_PATH, which restored processes would inherit.
    cat >"$NEW/bin/criu" <<WRAPPER
#!/bin/sh
exec "$PREFIX/root/$libraries/$loader" --library-path "$PREFIX/root/$libraries" \\
    "$PREFIX/root/usr/sbin/criu" "\$@"
WRAPPER
    chmod 755 "$NEW/bin/criu"
}

[ "$(id -u)" = 0 ] ||
    die "not root: CRIU can't be installed, tested or used; snapshots will be off"
for tool in python3 setsid flock; do
    command -v "$tool" >/dev/null || die "$tool is missing: install it first"
done
use_if_works "$PREFIX/bin/criu"
use_if_works "$(command -v criu || echo /none)"
for tool in apt-get apt-config dpkg dpkg-deb gpgv; do
    command -v "$tool" >/dev/null ||
        die "$tool is missing, so Debian's CRIU can't be fetched: install CRIU >= $MINIMUM yourself"
done

mkdir -p "$PREFIX"
PREFIX=$(cd "$PREFIX" && pwd)
exec 9>"$PREFIX/.lock"
flock 9
use_if_works "$PREFIX/bin/criu" # another run may have made it meanwhile
NEW=$PREFIX/.new
APT=$NEW/apt
rm -rf "$NEW"
trap 'rm -rf "$NEW"' EXIT
mkdir -p "$NEW"

from=$(mirror)
[ -n "$from" ] || die "this machine's apt sources name no Debian archive: set DEBIAN_MIRROR=URL"
keys=$(keyring)
say "installing CRIU of Debian $SUITE into $PREFIX"
configure_apt "$from" "$keys"
fetch "$from" "$keys"
unpack
rm -rf "$APT" "$NEW/keys" "${PREFIX:?}/root" "${PREFIX:?}/bin" "$PREFIX/SHA256SUMS"
mv "$NEW"/* "$PREFIX/"
use_if_works "$PREFIX/bin/criu"
die "the CRIU in $PREFIX does not work on this kernel ($(uname -r)); the line above says why"
