#!/bin/sh
# Builds the real kube-apiserver that tests/{contract,integration}/kubernetes run against, from the
# sources of Debian 12's package `kubernetes`, and installs it into PREFIX. Nothing else of the
# machine changes: the Go compiler is unpacked into a temporary folder and goes with it. Takes 5 to
# 10 minutes on two cores; with one there already it takes none.
#
#   deploy/kubernetes/apiserver.sh [PREFIX]     default /opt/dynamo-elastic/kube-apiserver
#
# Only tests need it. A cluster brings its own.
set -eu
PREFIX=${1:-/opt/dynamo-elastic/kube-apiserver}
SUITE=bookworm
MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
GO=1.19

say() { echo "apiserver.sh: $*" >&2; }
if "$PREFIX/kube-apiserver" --version >/dev/null 2>&1; then
    echo "$PREFIX/kube-apiserver"
    exit 0
fi
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"

# An apt of our own: lists, cache and state in $work.
mkdir -p apt/lists/partial apt/cache/archives/partial
: >apt/status
printf 'deb [signed-by=%s] %s %s main\ndeb-src [signed-by=%s] %s %s main\n' \
    "$KEYRING" "$MIRROR" "$SUITE" "$KEYRING" "$MIRROR" "$SUITE" >apt/sources.list
cat >apt/apt.conf <<END
Dir::State "$work/apt";
Dir::State::Lists "$work/apt/lists";
Dir::State::status "$work/apt/status";
Dir::Cache "$work/apt/cache";
Dir::Etc::SourceList "$work/apt/sources.list";
Dir::Etc::SourceParts "/nonexistent";
APT::Sandbox::User "root";
END
export APT_CONFIG="$work/apt/apt.conf"
say "fetching the sources and a Go compiler"
apt-get -qq update
apt-get -qq source --download-only kubernetes
apt-get -qq download "golang-$GO-go" "golang-$GO-src" golang-github-modern-go-reflect2-dev
for package in golang-*.deb; do dpkg-deb -x "$package" go; done
mkdir -p gopath/src/k8s.io
tar xzf kubernetes_*.orig.tar.gz
mv kubernetes-[0-9]* gopath/src/k8s.io/kubernetes
# The vendored reflect2 crashes when built with Go >= 1.18; Debian packages the version that does not.
vendored=gopath/src/k8s.io/kubernetes/vendor/github.com/modern-go/reflect2
rm "$vendored"/*.go "$vendored"/*.s
cp go/usr/share/gocode/src/github.com/modern-go/reflect2/*.[gs]* "$vendored"

export GOROOT="$work/go/usr/lib/go-$GO" GOPATH="$work/gopath" GOCACHE="$work/cache" GO111MODULE=off CGO_ENABLED=0
PATH="$GOROOT/bin:$PATH"
cd gopath/src/k8s.io/kubernetes
version=v$(sed -n 's/^Version: .*really\([0-9.]*\)-.*/\1/p' "$work"/kubernetes_*.dsc)

say "generating the schema of the API"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
vendored=$(cd staging/src && grep -rl --include='*.go' '+k8s:openapi-gen=' . | xargs -n 1 dirname | sort -u |
    grep -v -e /testdata -e code-generator -e sample- | sed 's#^\.#k8s.io/kubernetes/vendor#')
own=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd | xargs -n 1 dirname | sort -u |
    sed 's#^#k8s.io/kubernetes/#')
# shellcheck disable=SC2086 # two lists of names
"$work/openapi-gen" -h /dev/null -i "$(echo $vendored $own | tr ' ' ,)" \
    -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi -r "$work/violations" 2>/dev/null

say "building kube-apiserver $version (minutes)"
about=k8s.io/kubernetes/vendor/k8s.io/component-base/version
go build -ldflags "-s -w -X $about.gitVersion=$version -X $about.gitMajor=1 -X $about.gitMinor=20" \
    -o "$work/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
"$work/kube-apiserver" --version >&2
mkdir -p "$PREFIX"
mv "$work/kube-apiserver" "$PREFIX/kube-apiserver"
echo "$PREFIX/kube-apiserver"
