#!/bin/sh
# Builds the image without a container daemon or a registry: build-image.sh [ARCHIVE]
#
# Needs root, and buildah and debootstrap of Debian (`apt-get install buildah debootstrap`). debootstrap makes the base from Debian's packages;
# it takes the tag that the Dockerfile asks for. On a machine with docker and a registry, `docker build` does the same from the published base.
# Ends with the image under its name in buildah's storage, or as a file for `docker load` where ARCHIVE says so.
set -eu
cd "$(dirname "$0")/.."

for program in buildah debootstrap; do
    command -v "$program" >/dev/null 2>&1 || { echo "build-image: $program is not there; apt-get install $program" >&2; exit 3; }
done
[ "$(id -u)" -eq 0 ] || { echo "build-image: must be root" >&2; exit 3; }

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
name="fgpu-exporter:$version"
base=$(sed -n 's/^ARG BASE=//p' Dockerfile)
suite=trixie
# No mounts of an overlay file system and no namespaces: this also works where those are not allowed.
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase "$suite" "$root/base" >"$root/log" 2>&1 || { tail -5 "$root/log" >&2; exit 1; }
    # As the published slim image: without lists, caches and documentation.
    rm -rf "$root"/base/var/lib/apt/lists/* "$root"/base/var/cache/apt/* "$root"/base/usr/share/doc/* "$root"/base/usr/share/man/* \
        "$root"/base/usr/share/locale/* "$root"/base/var/log/*
    from_scratch=$(buildah from scratch)
    buildah add --quiet "$from_scratch" "$root/base" / >/dev/null
    buildah config --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$from_scratch"
    buildah commit --quiet --rm "$from_scratch" "$base" >/dev/null
fi

# How this machine reaches its package index is this machine's affair: its certificates and pip's index go in for the build alone.
settings=$(mktemp -d)
trap 'rm -rf "$settings" ${root:+"$root"}' EXIT
cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$settings/certificates.crt"
printf '[global]\ncert = /run/certificates.crt\n' >"$settings/pip.conf"
index=$(python3 -m pip config get global.index-url 2>/dev/null || true)
[ -z "$index" ] || printf 'index-url = %s\n' "$index" >>"$settings/pip.conf"
volumes="--volume $settings/certificates.crt:/run/certificates.crt:ro --volume $settings/pip.conf:/etc/pip.conf:ro"
# shellcheck disable=SC2086 - a list of options
buildah build --pull=never --network=host --format docker --layers=false $volumes --tag "$name" .
[ $# -eq 0 ] || rm -f "$1"
[ $# -eq 0 ] || buildah push --quiet "$name" "docker-archive:$1:$name"
echo "$name"
