# shellcheck shell=bash
# How the GPUs hang together, and what NCCL should know of it: /etc/dflash/gpu.env, which the training worker reads.
# These cards have no NVLink: everything crosses PCIe. Direct copies between them are fast where the platform lets them through, and
# hang, or silently deliver zeros, where an IOMMU or ACS rewrites their addresses. So they are allowed only if the driver calls every
# pair fine and no IOMMU translates; infra/host/p2p_check.py proves it with data.

step_topology() {
  if ! command -v nvidia-smi >/dev/null; then note topology "no driver yet: nothing to see"; return; fi
  local matrix peers farthest reason='' allowed=yes
  if ! matrix="$(nvidia-smi topo -m)" || ! peers="$(nvidia-smi topo -p2p r)"; then
    problem topology "nvidia-smi topo fails" "see what step gpu says"
    return
  fi
  matrix="$(plain "$matrix")" peers="$(plain "$peers")"
  farthest="$(links "$matrix" | cut -d' ' -f3 | rank_links | sort -n | tail -n 1 | cut -d' ' -f2)"
  if [[ -z "$farthest" ]]; then note topology "one GPU: no pairs"; else
    note topology "$(links "$matrix" | cut -d' ' -f3 | sort | uniq -c | awk '{ printf "%s%s pairs %s", (NR > 1 ? ", " : ""), $1, $2 }')"
  fi
  numa_note "$matrix"

  local bad
  bad="$(links "$peers" | awk '$3 != "OK" { printf "%s%s-%s %s", (n++ ? ", " : ""), $1, $2, $3 }')"
  if [[ -n "$bad" ]]; then allowed='' reason="the driver offers no direct copies: $bad"; fi
  if iommu_translates; then allowed='' reason="${reason:+$reason; }an IOMMU translates addresses"; fi
  if [[ -n "$allowed" ]]; then
    ok topology "direct copies between all pairs (prove it: $BIN/python infra/host/p2p_check.py)"
  else
    problem topology "$reason" "boot with iommu=pt (or the IOMMU off) and ACS off in the firmware; until then NCCL goes through host memory"
  fi
  want_file topology /etc/dflash/gpu.env 644 < <(nccl_settings "$allowed" "$farthest")
}

plain() { # without the underlining of a terminal
  # shellcheck disable=SC2001
  sed 's/\x1b\[[0-9;]*m//g' <<<"$1"
}

links() { # links MATRIX: "GPU0 GPU1 NODE" for every unordered pair of GPUs of an `nvidia-smi topo` matrix
  awk '
    !columns && $1 ~ /^GPU[0-9]+$/ && $2 ~ /^GPU[0-9]+$/ { for (i = 1; i <= NF && $i ~ /^GPU[0-9]+$/; i++) name[i] = $i; columns = i - 1; next }
    columns && $1 ~ /^GPU[0-9]+$/ { row++; for (i = row + 1; i <= columns; i++) print $1, name[i], $(i + 1) }
  ' <<<"$1"
}

rank_links() { # nearest first
  awk '{ rank = index("NV PIX PXB PHB NODE SYS", substr($1, 1, 2) == "NV" ? "NV" : $1); print rank, $1 }'
}

numa_note() { # which GPUs are near which processors: a rank's reader and pinned memory belong there
  local nodes
  nodes="$(awk '
    !columns && $1 ~ /^GPU[0-9]+$/ && $2 ~ /^GPU[0-9]+$/ { for (i = 1; i <= NF && $i ~ /^GPU[0-9]+$/; i++); columns = i - 1; width = NF; at = 0
      for (i = columns + 1; i <= NF; i++) { if ($i == "CPU") at = i; if ($i == "NUMA") numa = 1 } next }
    columns && $1 ~ /^GPU[0-9]+$/ { for (i = columns + 2; i < NF; i++) if ($i ~ /^[0-9,-]+$/ && $(i + 1) ~ /^[0-9,-]+$/) { node[$(i + 1)] = node[$(i + 1)] " " substr($1, 4); break } }
    END { for (n in node) printf "NUMA node %s: GPU%s\n", n, node[n] }' <<<"$1" | sort | paste -s -d ';' | sed 's/;/; /g')"
  if [[ -n "$nodes" ]]; then note topology "$nodes"; fi
}

iommu_translates() {
  local command_line
  command_line="$(cat "$PREFIX/proc/cmdline" 2>/dev/null || true)"
  [[ -n "$(ls -A "$PREFIX/sys/class/iommu" 2>/dev/null)" ]] || return 1
  [[ " $command_line " != *" iommu=pt "* && " $command_line " != *" amd_iommu=off "* && " $command_line " != *" intel_iommu=off "* ]]
}

nccl_settings() { # nccl_settings ALLOWED FARTHEST: the content of gpu.env
  echo "# Written by infra/host/setup from what nvidia-smi says; run it again after moving cards."
  echo "# Numbers of GPUs as nvidia-smi has them, and not by speed."
  echo "CUDA_DEVICE_ORDER=PCI_BUS_ID"
  if [[ -n "$1" ]]; then
    echo "# Direct copies up to the farthest pair of this host ($2)."
    case "$2" in
      SYS) echo "NCCL_P2P_LEVEL=SYS" ;;
      NODE | PHB) echo "NCCL_P2P_LEVEL=PHB" ;;
      PXB | PIX) echo "NCCL_P2P_LEVEL=PXB" ;;
      *) echo "# One GPU, or NVLink: NCCL's own choice." ;;
    esac
  else
    echo "# No direct copies between GPUs: they hang or corrupt here. Through host memory instead."
    echo "NCCL_P2P_DISABLE=1"
  fi
  echo "# No NVSwitch on these cards."
  echo "NCCL_NVLS_ENABLE=0"
  if [[ -z "$(ls -A "$PREFIX/sys/class/infiniband" 2>/dev/null)" ]]; then
    echo "# No InfiniBand here: nothing to search for at every start."
    echo "NCCL_IB_DISABLE=1"
  fi
  echo "# A collective that never ends becomes an error of the rank, which the supervisor sees."
  echo "TORCH_NCCL_ASYNC_ERROR_HANDLING=1"
  echo "NCCL_DEBUG=WARN"
}
