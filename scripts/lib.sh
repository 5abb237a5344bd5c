# SPDX-License-Identifier: MIT
# Shared by the scripts of this folder; sourced, never run. POSIX shell, so that it works under the
# shell of a bare Debian. It owns the locations (root, cache), messages, counting of usable cores and
# memory, and the installation of Debian packages. It changes nothing outside the checkout except by
# xp_need_packages.

set -eu
# A bare container has no locale; Python and sort must not depend on one.
export LC_ALL="${LC_ALL:-C.UTF-8}"

xp_root=$(cd "$(dirname "$0")/.." && pwd -P)
xp_cache="$xp_root/.xpool-cache"

xp_say() { printf '%s\n' "xpool: $*"; }
xp_warn() { printf '%s\n' "xpool: $*" >&2; }
xp_die() {
    printf '%s\n' "xpool: error: $*" >&2
    exit 1
}

# Python of the system. A version manager's shim in PATH may point at any version, so Debian's own
# interpreter is preferred; XPOOL_PYTHON overrides.
xp_python() {
    for xp_candidate in "${XPOOL_PYTHON:-}" /usr/bin/python3 python3; do
        [ -n "$xp_candidate" ] || continue
        if command -v "$xp_candidate" >/dev/null 2>&1 &&
            "$xp_candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$xp_candidate"
            return 0
        fi
    done
    return 1
}

# Whole cores this process may use: affinity, bounded by the cgroup's CPU quota (v2, then v1).
xp_cpus() {
    xp_count=$(nproc 2>/dev/null || echo 1)
    xp_quota=""
    xp_group=$(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null | head -n 1)
    for xp_file in "/sys/fs/cgroup${xp_group}/cpu.max" /sys/fs/cgroup/cpu.max; do
        if [ -r "$xp_file" ]; then
            read -r xp_quota xp_period <"$xp_file" || true
            break
        fi
    done
    if [ -z "$xp_quota" ] && [ -r /sys/fs/cgroup/cpu/cpu.cfs_quota_us ]; then
        xp_quota=$(cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us)
        xp_period=$(cat /sys/fs/cgroup/cpu/cpu.cfs_period_us)
    fi
    case "$xp_quota" in
    '' | max | -1) ;;
    *)
        xp_limit=$(((xp_quota + xp_period - 1) / xp_period))
        [ "$xp_limit" -ge 1 ] || xp_limit=1
        [ "$xp_limit" -ge "$xp_count" ] || xp_count=$xp_limit
        ;;
    esac
    echo "$xp_count"
}

# Memory this process may still take, in MiB: MemAvailable, bounded by the cgroup's limit.
xp_memory_mib() {
    xp_free=$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)
    xp_group=$(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null | head -n 1)
    for xp_pair in "/sys/fs/cgroup${xp_group}/memory.max /sys/fs/cgroup${xp_group}/memory.current" \
        "/sys/fs/cgroup/memory.max /sys/fs/cgroup/memory.current" \
        "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory/memory.usage_in_bytes"; do
        if [ -r "${xp_pair% *}" ] && [ -r "${xp_pair#* }" ]; then
            xp_limit=$(cat "${xp_pair% *}")
            xp_used=$(cat "${xp_pair#* }")
            case "$xp_limit" in
            max) ;;
            *)
                xp_left=$(awk -v a="$xp_limit" -v b="$xp_used" 'BEGIN { printf "%d", (a - b) / 1048576 }')
                [ "$xp_left" -ge "$xp_free" ] || xp_free=$xp_left
                ;;
            esac
            break
        fi
    done
    echo "$xp_free"
}

# Compile jobs: one a core, and no more than memory allows at 700 MiB a compiler.
xp_jobs() {
    xp_n=$(xp_cpus)
    xp_m=$(($(xp_memory_mib) / 700))
    [ "$xp_m" -ge 1 ] || xp_m=1
    if [ "$xp_m" -lt "$xp_n" ]; then echo "$xp_m"; else echo "$xp_n"; fi
}

# xp_need_disk MIB PLACE WHAT: says what is needed, and stops when the disk has less.
xp_need_disk() {
    mkdir -p "$2"
    xp_have=$(df -Pm "$2" | awk 'NR == 2 { print $4 }')
    xp_say "$3 needs about $1 MiB of disk in $2 ($xp_have MiB are free)"
    [ "$xp_have" -ge "$1" ] || xp_die "not enough disk for $3: $1 MiB needed, $xp_have MiB free in $2"
}

# xp_need_packages WHAT DISK_MIB PACKAGE...: installs the missing ones as root or by sudo without a
# password; otherwise prints the one line to run and exits 2. A second call does nothing.
xp_need_packages() {
    xp_what=$1
    xp_mib=$2
    shift 2
    xp_missing=""
    for xp_package in "$@"; do
        xp_state=$(dpkg-query -W -f '${db:Status-Status}' "$xp_package" 2>/dev/null || true)
        [ "$xp_state" = installed ] || xp_missing="$xp_missing $xp_package"
    done
    [ -n "$xp_missing" ] || return 0
    command -v apt-get >/dev/null 2>&1 ||
        xp_die "missing packages:$xp_missing; install them with your system's package manager"
    xp_as=""
    if [ "$(id -u)" -ne 0 ]; then
        if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
            xp_as="sudo -n"
        else
            xp_warn "missing packages for $xp_what, and this user may not install them. Run:"
            printf '    sudo apt-get update && sudo apt-get install -y --no-install-recommends%s\n' \
                "$xp_missing" >&2
            exit 2
        fi
    fi
    xp_say "installing for $xp_what (up to $xp_mib MiB of disk):$xp_missing"
    xp_apt="$xp_as env DEBIAN_FRONTEND=noninteractive apt-get"
    # Package lists of a bare container are empty; they are fetched only when a package is unknown.
    for xp_package in $xp_missing; do
        if [ -z "$(apt-cache policy "$xp_package" 2>/dev/null | sed -n 's/^ *Candidate: //p' | grep -v '(none)')" ]; then
            $xp_apt update || xp_die "apt-get update failed"
            break
        fi
    done
    # Lists may be older than the archive: one retry after an update.
    # shellcheck disable=SC2086
    $xp_apt install -y --no-install-recommends $xp_missing || {
        $xp_apt update && $xp_apt install -y --no-install-recommends $xp_missing
    } || xp_die "could not install:$xp_missing"
}

# xp_lock NAME: holds .xpool-cache/NAME.lock until the script ends, so that two runs do not meet.
xp_lock() {
    mkdir -p "$xp_cache"
    exec 9>"$xp_cache/$1.lock"
    if ! flock -n 9; then
        xp_say "another run holds $xp_cache/$1.lock; waiting for it"
        flock 9
    fi
}

xp_sha256() { sha256sum "$1" | cut -d ' ' -f 1; }
