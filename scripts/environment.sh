# Sourced by the other scripts: sets PYTHON to an interpreter that has what they need.
#
#   ensure_environment [MODULE...]
#
# Takes the active environment (or ./.venv, or python3) if it imports torch >= 2.11, the package's dependencies and the
# MODULEs; then nothing is installed and no network is used. Otherwise makes ./.venv and installs ${MDI_TORCH:-torch>=2.11}
# and the package with its extras ${INSTALL_EXTRAS:-test} into it. Either way the package is built in place if it has not been.

INSTALL_EXTRAS=${INSTALL_EXTRAS:-test}

environment_is_complete() { # PYTHON MODULE...
    "$1" - "${@:2}" 2>/dev/null <<'PY'
import importlib, re, sys
for name in ["torch", "numpy", "safetensors", "tokenizers", "tqdm", *sys.argv[1:]]:
    importlib.import_module(name)
import torch
sys.exit(tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < (2, 11))
PY
}

ensure_environment() {
    local candidate
    PYTHON=
    for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$PWD/.venv/bin/python" python3 python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null && environment_is_complete "$candidate" "$@"; then
            PYTHON=$(command -v "$candidate")
            break
        fi
    done
    if [ -z "$PYTHON" ]; then
        echo "environment: making .venv with ${MDI_TORCH:-torch>=2.11}" >&2
        python3 -m venv .venv
        PYTHON=$PWD/.venv/bin/python
        "$PYTHON" -m pip install --quiet "${MDI_TORCH:-torch>=2.11}" "setuptools>=77" wheel ninja pybind11
        # ninja and the compiler wrappers are looked up on PATH
        PATH="$PWD/.venv/bin:$PATH" "$PYTHON" -m pip install --quiet --no-build-isolation -e ".[$INSTALL_EXTRAS]"
    fi
    export PATH="$(dirname "$PYTHON"):$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    if ! ls mini_deepinfer/_C*.so >/dev/null 2>&1; then
        "$PYTHON" setup.py --quiet build_ext --inplace || echo "environment: no extension; the reference ops will run" >&2
    fi
    echo "environment: $PYTHON, torch $("$PYTHON" -c 'import torch; print(torch.__version__)')" >&2
}
