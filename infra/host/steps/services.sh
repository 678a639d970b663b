# shellcheck shell=bash
# Secrets, units, and what the Prefect server has to know: pools, deployments, automations.
UNITS=(dflash.target dflash-gpu.service dflash-worker-train.service dflash-worker-health.service dflash-health-served.service)
SERVER_UNITS=(dflash-prefect-server.service dflash-mlflow.service dflash-backup.service dflash-backup.timer)

step_services() {
  local folder="$PREFIX/etc/dflash" unit elsewhere='' units=("${UNITS[@]}")
  if [[ -f "$folder/client.env" && ! -e "$folder/server.env" ]]; then elsewhere=yes; else units+=("${SERVER_UNITS[@]}"); fi
  if [[ -n "$elsewhere" ]]; then
    ok services "/etc/dflash/client.env and no server.env: the servers are elsewhere, this host has workers"
  elif has_names "$folder/server.env" .env.example && has_names "$folder/client.env" client.env.example; then
    ok services "/etc/dflash/server.env and client.env"
  else
    change services "secrets in /etc/dflash/server.env and client.env" make_secrets "$folder"
  fi
  for unit in "${units[@]}"; do
    want_file services "/etc/systemd/system/$unit" 644 < <(render_unit "$unit") # no pipe: it would count in a subshell
  done
  if ! command -v curl >/dev/null; then problem services "curl is not there" "apt-get install curl: units start behind each other by it"; fi
  if [[ -z "$elsewhere" ]]; then create_databases; fi
  if [[ -z "$PREFIX" ]]; then enable_units "$elsewhere"; fi
}

enable_units() { # enable_units ELSEWHERE: health checks by themselves, so that whoever puts the other unit in their place keeps it
  local missing=()
  if [[ -z "$CHECK" ]]; then systemctl daemon-reload; fi
  if ! any_enabled dflash.target; then
    missing+=(dflash.target)
    if [[ -z "$1" ]]; then missing+=(dflash-backup.timer); fi
  fi
  if ! any_enabled dflash-worker-health.service dflash-health-served.service; then missing+=(dflash-worker-health.service); fi
  if [[ ${#missing[@]} -eq 0 ]]; then ok services "dflash.target and health checks are enabled"; else
    change services "enabled and started: ${missing[*]}" systemctl enable --now "${missing[@]}"
  fi
}

any_enabled() { # any_enabled UNIT...
  systemctl is-enabled --quiet "$@" 2>/dev/null
}

has_names() { # has_names FILE TEMPLATE: the file has every name of the template, which an update may have more of
  [[ -f "$1" ]] || return 1
  [[ -r "$1" ]] || return 0 # root's alone, and looked at by somebody else
  [[ -z "$(comm -13 <(names_in "$1") <(names_in "$CHECKOUT/infra/$2"))" ]]
}

names_in() {
  sed -n 's/^\([A-Z][A-Z0-9_]*\)=.*/\1/p' "$1" | sort
}

make_secrets() { # the servers' file is root's alone; people of the group may reach the servers
  mkdir -p "$1" && chmod 755 "$1" && "$CHECKOUT/infra/make-secrets" "$1/server.env" "$1/client.env" && chmod 600 "$1/server.env" || return 1
  if [[ $EUID -eq 0 && -z "$PREFIX" ]]; then chgrp "$USER_NAME" "$1/client.env" && chmod 640 "$1/client.env"; fi
}

render_unit() { # render_unit NAME: the unit with this host's places
  sed -e "s#/opt/dflash-pipeline/.venv/bin#$BIN#g" -e "s#/opt/dflash-pipeline#$CHECKOUT#g" -e "s#/srv/dflash#$HOME_DIR#g" \
    -e "s#^\(User\|Group\)=dflash\$#\1=$USER_NAME#" "$CHECKOUT/infra/systemd/$1"
}

create_databases() { # in the machine's own PostgreSQL, as its superuser
  local host port
  host="$(setting DFLASH_DB_HOST)" port="$(setting DFLASH_POSTGRES_PORT)"
  if [[ -n "$host" && "$host" != 127.0.0.1 && "$host" != localhost ]]; then
    note services "databases are on $host: infra/services/create-databases makes them there"
    return
  fi
  if [[ -n "$PREFIX" ]]; then return; fi
  if [[ $EUID -ne 0 ]]; then note services "only root sees whether the databases are there"; return; fi
  local -x PGPORT="${port:-5432}"
  if ! command -v pg_isready >/dev/null || ! pg_isready --quiet; then
    problem services "no PostgreSQL answers" "apt-get install postgresql, or name another one in /etc/dflash/server.env (DFLASH_DB_HOST)"
    return
  fi
  local known
  known="$(setpriv --reuid=postgres --regid=postgres --init-groups psql -XAtc \
    "SELECT count(*) FROM pg_database WHERE datname IN ('prefect', 'mlflow', 'mlflow_auth')" postgres 2>/dev/null || echo 0)"
  if [[ "$known" == 3 ]]; then ok services "databases prefect, mlflow and mlflow_auth"; else
    change services "databases prefect, mlflow and mlflow_auth" make_databases
  fi
}

setting() { # setting NAME: its value in the servers' file, empty if it cannot be read
  sed -n "s/^$1=//p" "$PREFIX/etc/dflash/server.env" 2>/dev/null || true
}

make_databases() {
  # shellcheck source=/dev/null
  (set -a && source "$PREFIX/etc/dflash/server.env" && set +a &&
    setpriv --reuid=postgres --regid=postgres --init-groups "$CHECKOUT/infra/services/create-databases")
}

step_prefect() {
  if [[ ! -x "$BIN/prefect" ]]; then note prefect "no $BIN/prefect yet"; return; fi
  local pool client="$PREFIX/etc/dflash/client.env"
  if [[ -f "$client" && ! -r "$client" ]]; then
    note prefect "only who may read /etc/dflash/client.env sees what the server knows"
    return
  fi
  if ! as_user "$BIN/prefect" version >/dev/null 2>&1 || ! as_user "$BIN/prefect" work-pool ls >/dev/null 2>&1; then
    problem prefect "the server does not answer" "systemctl status dflash-prefect-server; journalctl -u dflash-prefect-server"
    return
  fi
  for pool in dflash-train dflash-health; do
    if as_user "$BIN/prefect" work-pool inspect "$pool" >/dev/null 2>&1; then ok prefect "work pool $pool"; else
      change prefect "work pool $pool" as_user "$BIN/prefect" work-pool create "$pool" --type process
    fi
  done
  if [[ -n "$CHECK" ]]; then
    if as_user "$BIN/prefect" deployment inspect train/train-v2 >/dev/null 2>&1; then ok prefect "deployments"; else
      change prefect "deployments of prefect.yaml" false
    fi
    if as_user "$BIN/prefect" automation ls 2>/dev/null | grep -q dflash; then ok prefect "automations"; else change prefect "automations" false; fi
    return
  fi
  # Both bring up to date what is there already, so they are done every time.
  refresh prefect "deployments of prefect.yaml" as_user "$BIN/prefect" --no-prompt deploy --all
  refresh prefect "automations" as_user "$BIN/python" -m flows.automations
}

refresh() { # refresh TOPIC TEXT COMMAND...: its output only if it fails
  local topic="$1" text="$2" said
  shift 2
  if said="$("$@" 2>&1)"; then ok "$topic" "$text, up to date"; else
    tail -n 20 <<<"$said"
    problem "$topic" "$text: failed" "run it by hand: $*"
  fi
}
