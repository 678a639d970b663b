# shellcheck shell=bash
# The GPUs and their driver: right number, right cards, a driver that CUDA 13 (torch's wheels) can use, nothing switched wrongly.
GPUS="${DFLASH_GPUS:-8}"
GPU_NAME="${DFLASH_GPU_NAME:-RTX PRO 6000 Blackwell}"
GPU_MEMORY_MIB="${DFLASH_GPU_MEMORY_MIB:-95000}"
DRIVER="${DFLASH_DRIVER:-580.65}" # the first that CUDA 13.0 runs on

step_gpu() {
  if ! command -v nvidia-smi >/dev/null; then
    problem gpu "nvidia-smi is not there" "install the driver, $DRIVER or newer, with its open kernel modules (Blackwell has no others), and reboot"
    return
  fi
  local rows
  if ! rows="$(nvidia-smi --query-gpu=index,name,driver_version,memory.total,persistence_mode,mig.mode.current,ecc.mode.current,pcie.link.width.max,pcie.link.width.current,compute_mode --format=csv,noheader,nounits)"; then
    problem gpu "nvidia-smi fails: $(head -n 1 <<<"$rows")" "see dmesg for NVRM lines; after a driver update, reboot"
    return
  fi
  local -a field
  local line count=0 driver='' slow=() wrong=() small=() idle=() mig=() shared=() unsure=()
  while IFS= read -r line; do
    IFS=',' read -ra field <<<"${line//, /,}"
    count=$((count + 1)) driver="${field[2]}"
    [[ "${field[1]}" == *"$GPU_NAME"* ]] || wrong+=("${field[0]}: ${field[1]}")
    [[ "${field[3]}" -ge "$GPU_MEMORY_MIB" ]] || small+=("${field[0]}: ${field[3]} MiB")
    [[ "${field[4]}" == Enabled ]] || idle+=("${field[0]}")
    [[ "${field[5]}" != Enabled ]] || mig+=("${field[0]}")
    [[ "${field[6]}" != Disabled ]] || unsure+=("${field[0]}")
    # A card that idles lowers its generation, but never its width.
    [[ "${field[8]}" == "${field[7]}" ]] || slow+=("${field[0]}: x${field[8]} of x${field[7]}")
    [[ "${field[9]}" == Default ]] || shared+=("${field[0]}: ${field[9]}")
  done <<<"$rows"

  if [[ $count -eq "$GPUS" ]]; then ok gpu "$count GPUs"; else
    problem gpu "$count GPUs, not $GPUS" "a card that fell off the bus shows in dmesg (Xid 79); DFLASH_GPUS says how many there should be"
  fi
  if [[ ${#wrong[@]} -eq 0 ]]; then ok gpu "all are $GPU_NAME"; else
    problem gpu "other cards: ${wrong[*]}" "DFLASH_GPU_NAME names another kind; set cluster.device_memory_bytes to its memory"
  fi
  if [[ ${#small[@]} -gt 0 ]]; then problem gpu "less memory than $GPU_MEMORY_MIB MiB: ${small[*]}" "set cluster.device_memory_bytes to it"; fi
  if at_least "$driver" "$DRIVER"; then ok gpu "driver $driver"; else
    problem gpu "driver $driver is older than $DRIVER" "install a newer one, with its open kernel modules, and reboot"
  fi
  if [[ ${#idle[@]} -eq 0 ]]; then ok gpu "persistence mode"; else
    change gpu "persistence mode on for GPU ${idle[*]}" nvidia-smi --persistence-mode=1
  fi
  if [[ ${#mig[@]} -gt 0 ]]; then problem gpu "MIG is on for GPU ${mig[*]}" "nvidia-smi --multi-instance-gpu=0, when nobody uses the card"; fi
  if [[ ${#unsure[@]} -gt 0 ]]; then note gpu "ECC is off for GPU ${unsure[*]}: a flipped bit is a wrong loss there, and no error"; fi
  if [[ ${#slow[@]} -gt 0 ]]; then problem gpu "PCIe lanes missing: ${slow[*]}" "seat the card or its riser again; see the slot's bifurcation in the firmware"; fi
  if [[ ${#shared[@]} -gt 0 ]]; then problem gpu "compute mode: ${shared[*]}" "nvidia-smi --compute-mode=0: supervisor, ranks and probes are several processes"; fi
}
