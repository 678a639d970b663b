# shellcheck shell=bash
# Limits of the machine, the pipeline's user and its folders.
SHM_GIB="${DFLASH_SHM_GIB:-16}"
FREE_GIB="${DFLASH_FREE_GIB:-500}"

step_limits() {
  # For logins; units carry their own limits, which these do not reach.
  want_file limits /etc/security/limits.d/90-dflash.conf 644 <<LIMITS
# Written by infra/host/setup. Pinned host memory for copies to GPUs; a file a shard, a socket a rank; no core files of 100 GB.
$USER_NAME  -  memlock  unlimited
$USER_NAME  -  nofile   1048576
$USER_NAME  -  core     0
LIMITS
  local before="$CHANGES"
  want_file limits /etc/sysctl.d/90-dflash.conf 644 <<'SYSCTL'
# Written by infra/host/setup.
# Pinned memory cannot move: the kernel's search for a nearer NUMA node only takes time.
kernel.numa_balancing = 0
# A mapping a tensor and a shard, in every rank.
vm.max_map_count = 1048576
# The page cache gives way before anything of a training is swapped.
vm.swappiness = 10
SYSCTL
  if [[ $CHANGES -gt $before && -z "$CHECK" && -z "$PREFIX" ]]; then sysctl --quiet --load=/etc/sysctl.d/90-dflash.conf; fi

  local kib
  kib="$(df --output=size --block-size=1K "$PREFIX/dev/shm" 2>/dev/null | tail -n 1 | tr -d ' ' || true)"
  if [[ "${kib:-0}" -ge $((SHM_GIB * 1024 * 1024)) ]]; then ok limits "/dev/shm holds $((kib / 1024 / 1024)) GiB"; else
    problem limits "/dev/shm holds $((${kib:-0} / 1024 / 1024)) GiB, NCCL and loaders want $SHM_GIB" \
      "mount -o remount,size=50% /dev/shm, and the same in /etc/fstab"
  fi
}

step_folders() {
  if getent passwd "$USER_NAME" >/dev/null; then ok folders "user $USER_NAME"; else
    change folders "user $USER_NAME" useradd --system --user-group --home-dir "$HOME_DIR" --shell /bin/bash "$USER_NAME"
  fi
  local name path
  for name in "" /runs /data /cache /prefect; do
    path="$HOME_DIR$name"
    if [[ -d "$PREFIX$path" ]]; then ok folders "$path"; else change folders "$path" make_folder "$PREFIX$path" 750; fi
  done
  # Configurations say `runs` and `data/...`, relative to the checkout; they belong on the large disk.
  for name in runs data; do
    path="$CHECKOUT/$name"
    if [[ -n "$PREFIX" ]]; then path="$PREFIX$CHECKOUT/$name"; fi
    if [[ -L "$path" && "$(readlink "$path")" == "$HOME_DIR/$name" ]]; then ok folders "$name -> $HOME_DIR/$name"
    elif [[ ! -e "$path" && ! -L "$path" ]]; then change folders "$name -> $HOME_DIR/$name" link_folder "$HOME_DIR/$name" "$path"
    else problem folders "$path is there already" "move it to $HOME_DIR/$name and make it a link: units write below $HOME_DIR alone"; fi
  done
  case "$CHECKOUT/" in
    /home/* | /root/*) problem folders "the checkout is below ${CHECKOUT%/*}" "units cannot see home folders: clone it to /opt/dflash-pipeline" ;;
  esac
  free_space
}

make_folder() {
  mkdir -p "$1" && chmod "$2" "$1"
  if [[ $EUID -eq 0 && -z "$PREFIX" ]]; then chown "$USER_NAME:" "$1"; fi
}

link_folder() {
  mkdir -p "$(dirname "$2")" && ln -s "$1" "$2"
}

free_space() {
  local place="$PREFIX$HOME_DIR" kind free
  while [[ ! -d "$place" ]]; do place="$(dirname "$place")"; done
  read -r kind free < <(df --output=fstype,avail --block-size=1G "$place" | tail -n 1)
  case "$kind" in
    tmpfs | ramfs) problem folders "$HOME_DIR is in memory ($kind)" "checkpoints must outlive the power: mount a disk there" ;;
    nfs* | cifs | fuse.sshfs) problem folders "$HOME_DIR is on $kind" "locks and fsync are only relied on on a local disk; copy to S3 by checkpoint.store" ;;
    *) ok folders "$HOME_DIR is on $kind" ;;
  esac
  if [[ "$free" -ge "$FREE_GIB" ]]; then ok folders "$free GiB free"; else
    problem folders "$free GiB free, $FREE_GIB wanted" "a checkpoint of 1.7 B parameters with its optimizer is about 21 GB; DFLASH_FREE_GIB sets another bound"
  fi
}
