# shellcheck shell=bash disable=SC2034
# How a step of setup reports, and the few ways in which it changes anything. With --check nothing does.
CHECK=
PREFIX="${DFLASH_HOST_PREFIX:-}" # a folder in place of / for the files of /etc, /srv, /proc and /sys: a dry run, and the tests
OKS=0 CHANGES=0 PROBLEMS=0
USER_NAME="${DFLASH_USER:-dflash}"
HOME_DIR="${DFLASH_HOME:-/srv/dflash}"
BIN="${DFLASH_BIN:-$CHECKOUT/.venv/bin}"

ok() { # ok TOPIC TEXT
  OKS=$((OKS + 1))
  printf 'ok       %-10s %s\n' "$1" "$2"
}

problem() { # problem TOPIC TEXT REMEDY: what this script cannot or must not put right
  PROBLEMS=$((PROBLEMS + 1))
  printf 'PROBLEM  %-10s %s\n         %-10s -> %s\n' "$1" "$2" "" "$3"
}

note() { # note TOPIC TEXT: good to know, nothing to do
  printf 'note     %-10s %s\n' "$1" "$2"
}

change() { # change TOPIC TEXT COMMAND...: does it, or says that it would
  local topic="$1" text="$2"
  shift 2
  CHANGES=$((CHANGES + 1))
  if [[ -n "$CHECK" ]]; then
    printf 'change   %-10s %s\n' "$topic" "$text"
    return
  fi
  if "$@"; then
    printf 'changed  %-10s %s\n' "$topic" "$text"
  else
    CHANGES=$((CHANGES - 1))
    problem "$topic" "$text: failed" "run it by hand: $*"
  fi
}

want_file() { # want_file TOPIC PATH MODE, the content on standard input: the file is exactly that
  local topic="$1" path="$PREFIX$2" mode="$3" content
  content="$(cat; printf x)"
  content="${content%x}"
  if [[ -f "$path" && "$(cat "$path"; printf x)" == "${content}x" && "$(stat -c %a "$path")" == "$mode" ]]; then
    ok "$topic" "$2"
  else
    change "$topic" "$2" write_file "$path" "$mode" "$content"
  fi
}

write_file() { # write_file PATH MODE CONTENT: whole or not at all
  local fresh
  mkdir -p "$(dirname "$1")"
  fresh="$(mktemp "$1.XXXXXX")"
  printf '%s' "$3" >"$fresh"
  chmod "$2" "$fresh"
  mv "$fresh" "$1"
}

at_least() { # at_least VERSION MINIMUM: by numbers between dots
  [[ "$(printf '%s\n%s\n' "$2" "$1" | sort --version-sort | head -n 1)" == "$2" ]]
}

as_user() { # as_user COMMAND...: as the pipeline's user, with what it needs to reach the servers
  local line client="$PREFIX/etc/dflash/client.env" settings=()
  if [[ -r "$client" ]]; then
    while IFS= read -r line; do
      if [[ "$line" =~ ^[A-Z][A-Z0-9_]*= ]]; then settings+=("$line"); fi
    done <"$client"
  fi
  if [[ $EUID -eq 0 && -z "$PREFIX" ]]; then
    # By the environment of a child, never on a command line.
    (cd "$CHECKOUT" && export HOME="$HOME_DIR" PREFECT_HOME="$HOME_DIR/prefect" "${settings[@]}" &&
      setpriv --reuid="$USER_NAME" --regid="$USER_NAME" --init-groups "$@")
  else
    (cd "$CHECKOUT" && export "${settings[@]}" && "$@")
  fi
}
