#!/bin/sh
# Installs the programs that some tests run. Tests of a program that is not there are skipped and say so.
set -eu

wanted=""
command -v cc >/dev/null 2>&1 || wanted="$wanted gcc libc6-dev"
command -v prometheus >/dev/null 2>&1 || wanted="$wanted prometheus"
command -v prometheus-alertmanager >/dev/null 2>&1 || wanted="$wanted prometheus-alertmanager"
command -v chromium >/dev/null 2>&1 || wanted="$wanted chromium"
[ -n "$wanted" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "make: not installed, because this is not root on Debian or Ubuntu:$wanted. The tests that need them are skipped." >&2
    exit 0
fi
# A package's service is not wanted, only its programs.
policy=/usr/sbin/policy-rc.d
made_policy=""
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    made_policy=yes
fi
apt-get update -qq || echo "make: the list of packages could not be updated" >&2
for package in $wanted; do
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$package" >/dev/null 2>&1 ||
        echo "make: $package could not be installed. The tests that need it are skipped." >&2
done
[ -z "$made_policy" ] || rm -f "$policy"
