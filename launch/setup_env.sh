#!/usr/bin/env bash
# Make a virtual environment with SGLang, this package and its test tools; do nothing if it is there.
#
#   launch/setup_env.sh [FOLDER]      FOLDER defaults to .venv
#
# A finished environment carries a stamp made from the files that say what to install, so a change there
# installs again and an interrupted installation is taken up again. PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv}
stamp=$venv/.ddtree-installed
needed_gb=15

fail() {
    echo "setup: $*" >&2
    exit 1
}

wanted=$(cat pyproject.toml setup.py | cksum)
if [[ -x $venv/bin/ddtree && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi

is_supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
python=
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c "$is_supported" >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [[ -z $python ]]; then
    found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "no ${PYTHON:-python3}")
    fail "Python 3.11 to 3.13 is needed and this machine has $found. Install one, or type: make PYTHON=/path/to/python3.11"
fi

if [[ ! -f $stamp ]]; then
    # What an interrupted installation has already taken need not be free again.
    taken_kb=$([[ -d $venv ]] && du -sk "$venv" | cut -f1 || echo 0)
    free_gb=$((($(df -Pk . | awk 'NR == 2 { print $4 }') + taken_kb) / 1024 / 1024))
    ((free_gb >= needed_gb)) ||
        fail "$needed_gb GB of free disk are needed in $PWD and $free_gb GB are there: SGLang and PyTorch are large."
fi

echo "setup: installing SGLang and this package into $venv with $("$python" --version): 11 GB, once."
echo "setup: this takes 3 to 15 minutes."
if [[ ! -x $venv/bin/pip ]]; then
    "$python" -m venv --clear "$venv" ||
        fail "$python could not make $venv. On Debian and Ubuntu it needs the package $(basename "$python")-venv."
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
what=(--editable '.[sglang,test]')

# What pip is told by its files and variables under a name, the first of them: uv reads none of it.
setting() {
    sed -nE "s/^[a-z:]+\.$1='(.*)'\$/\1/p" <<<"$settings" | head -n 1 | sed 's/\\n/ /g'
}

# uv downloads and unpacks side by side, in a third of pip's time, and takes packages from where pip does.
install_with_uv() {
    "${pip[@]}" install --no-input --quiet uv || return
    local settings
    settings=$("${pip[@]}" config list)
    local options=(--index-strategy unsafe-best-match --cache-dir "$venv/.uv-cache") name value
    for name in index-url extra-index-url find-links constraint trusted-host; do
        for value in $(setting "$name"); do
            options+=("--${name/trusted-host/allow-insecure-host}" "$value")
        done
    done
    local certificates
    certificates=$(setting cert)
    env ${certificates:+SSL_CERT_FILE="$certificates"} \
        "$venv/bin/uv" pip install --python "$venv/bin/python" "${options[@]}" "${what[@]}" || return
    rm -rf "$venv/.uv-cache"
    compile_large_packages
}

# uv compiles nothing and pip everything: minutes. These are most of what a server imports, the rest can wait.
compile_large_packages() {
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # A few of their files are written for other Pythons, which is no matter.
    "$venv/bin/python" -m compileall -qq -j 0 "$packages"/{torch,sglang,transformers} || true
}

if ! install_with_uv; then
    echo "setup: uv could not install SGLang, pip goes on; for most of its time, unpacking, it says nothing."
    "${pip[@]}" install --no-input "${what[@]}" ||
        fail "pip could not install SGLang; its message is above. Run the same command again to go on from here."
fi
echo "$wanted" >"$stamp"
echo "setup: $venv is ready."
