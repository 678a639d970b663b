# shellcheck shell=bash
# The environment, and a torch that has kernels for these cards and a CUDA that the driver can run.
CAPABILITY="${DFLASH_GPU_CAPABILITY:-sm_120}"
TORCH_INDEX="${DFLASH_TORCH_INDEX_URL:-https://download.pytorch.org/whl/cu130}"

step_python() {
  local version pinned
  version="$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo 0)"
  if at_least "$version" 3.11; then ok python "python3 $version"; else
    problem python "python3 is $version, 3.11 is needed" "apt-get install python3 python3-venv"
    return
  fi
  if [[ -x "$BIN/prefect" ]]; then ok python "$BIN"; else
    change python "$BIN (a few minutes)" make -C "$CHECKOUT" setup
    if [[ ! -x "$BIN/prefect" ]]; then return; fi
  fi
  pinned="$(sed -n 's/^ *"torch==\([0-9.]*\)",$/\1/p' "$CHECKOUT/pyproject.toml")"
  check_torch "$pinned"
}

check_torch() { # check_torch PINNED: version, CUDA, kernels; replaced by the CUDA build if it is not one
  local said torch cuda kernels
  said="$("$BIN/python" -c 'import torch; print(torch.__version__.split("+")[0], torch.version.cuda or "none", ",".join(torch.cuda.get_arch_list()) or "none")' 2>/dev/null || echo "none none none")"
  read -r torch cuda kernels <<<"$said"
  if [[ "$torch" == "$1" && "$cuda" != none && ",$kernels," == *",$CAPABILITY,"* ]]; then
    ok python "torch $torch with CUDA $cuda and kernels for $CAPABILITY"
  elif [[ "$torch" == "$1" && "$cuda" != none && "$kernels" != none ]]; then
    problem python "torch $torch (CUDA $cuda) has no kernels for $CAPABILITY, only $kernels" "DFLASH_TORCH_INDEX_URL names another index of wheels"
  else
    change python "torch $1 with CUDA, in place of torch $torch (CUDA $cuda)" \
      "$BIN/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps --index-url "$TORCH_INDEX" "torch==$1"
    if [[ -z "$CHECK" ]]; then
      change python "what torch's CUDA build needs" \
        "$BIN/python" -m pip install --quiet --disable-pip-version-check --extra-index-url "$TORCH_INDEX" "torch==$1"
    fi
    return
  fi
  local driver_cuda
  driver_cuda="$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1 || true)"
  if [[ -z "$driver_cuda" ]]; then note python "no driver to compare CUDA $cuda with"
  elif at_least "$driver_cuda" "${cuda%%.*}.0"; then ok python "the driver runs CUDA $driver_cuda"
  else problem python "the driver runs CUDA $driver_cuda, torch was built for $cuda" "install a newer driver"; fi
}
