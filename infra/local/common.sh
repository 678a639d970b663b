# shellcheck shell=bash disable=SC2034
# Shared by up and down: where things are, and processes known by pid AND start time, so that a recycled pid is never touched.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$ROOT" || exit 1

BIN="${DFLASH_BIN:-$ROOT/.venv/bin}"
STATE="${DFLASH_LOCAL_DIR:-$ROOT/.local}"
# What `up` was told last time holds until it is told otherwise (an empty value takes it back): a stack that somebody brings back at
# night, in a new shell, is the stack that went down, and not another one with empty databases beside it.
REMEMBERED=(DFLASH_LOCAL_POSTGRES DFLASH_LOCAL_S3 DFLASH_LOCAL_AUTH DFLASH_HEALTH_SERVED DFLASH_PREFECT_PORT DFLASH_MLFLOW_PORT
  DFLASH_POSTGRES_PORT DFLASH_S3_PORT DFLASH_RUNS_DIR DFLASH_MLFLOW_STORE)
RECALLED=()
for setting in "${REMEMBERED[@]}"; do
  if [[ ! -v "$setting" && -f "$STATE/settings" ]] && line="$(grep -m 1 "^$setting=" "$STATE/settings")"; then
    export "${line?}"
    RECALLED+=("$setting")
  fi
done
PREFECT_PORT="${DFLASH_PREFECT_PORT:-4200}"
MLFLOW_PORT="${DFLASH_MLFLOW_PORT:-5000}"
RUNS="${DFLASH_RUNS_DIR:-$ROOT/runs}"
API="http://127.0.0.1:$PREFECT_PORT/api"
MLFLOW="http://127.0.0.1:$MLFLOW_PORT"
# Started in this order, stopped in the opposite one.
SERVICES=(postgres s3 prefect-server mlflow worker-train worker-health)
SERVER_ENV="$STATE/server.env" CLIENT_ENV="$STATE/client.env"

export PREFECT_API_URL="$API" PREFECT_UI_API_URL="$API"
export PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1 MLFLOW_DISABLE_TELEMETRY=true
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1

start_time_of() { # start time of a living process in clock ticks, empty if there is none (a zombie is none)
  [[ -r "/proc/$1/stat" ]] || return 0
  sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'
}

pid_of() { # pid of a service that runs, empty otherwise
  local file="$STATE/$1.pid" pid started
  [[ -f "$file" ]] || return 0
  read -r pid started <"$file"
  [[ -n "$started" && "$(start_time_of "$pid")" == "$started" ]] && echo "$pid" || true
}

left_behind() { # pids that a dead service has left and that may hold its port: whatever it started carries the mark of `start`
  if [[ ! -f "$STATE/$1.pid" || -n "$(pid_of "$1")" ]]; then return; fi
  grep -lzxF "$(mark_of "$1")" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3 || true
}

mark_of() { # variable in the environment of a service and of all that it starts: a number may be a stranger's by now, this is not
  echo "DFLASH_LOCAL_SERVICE=$STATE/$1"
}

end_left_behind() { # end_left_behind NAME: so that a server which was killed can start again; trainings outlive their worker
  local pids deadline=$((SECONDS + 5))
  if [[ "$1" == worker-* ]]; then return; fi
  mapfile -t pids < <(left_behind "$1")
  if [[ ${#pids[@]} -eq 0 ]]; then return; fi
  echo "$1 is dead: ending what it has left (${pids[*]})"
  kill -TERM "${pids[@]}" 2>/dev/null || true
  while [[ -n "$(left_behind "$1")" && $SECONDS -lt $deadline ]]; do sleep 0.1; done
  mapfile -t pids < <(left_behind "$1")
  if [[ ${#pids[@]} -gt 0 ]]; then kill -KILL "${pids[@]}" 2>/dev/null || true; fi
}

abandoned() { # abandoned WORKER: flow runs that have outlived the worker that started them, without what they have started themselves
  local pids pid parent
  mapfile -t pids < <(grep -lzxF "$(mark_of "$1")" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3)
  for pid in "${pids[@]}"; do
    parent="$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null | awk '$1 != "Z" { print $2 }')"
    if [[ -z "$parent" || " ${pids[*]} " == *" $parent "* ]]; then continue; fi
    # A worker gives this to its flow runs and has none itself: one that is not recorded any more is not touched.
    if grep -qz '^PREFECT__FLOW_RUN_ID=' "/proc/$pid/environ" 2>/dev/null; then echo "$pid"; fi
  done
}

end_abandoned() { # end_abandoned WORKER: asks them to stop and save, as infra/services/end-flow-runs does with the others
  local pids deadline=$((SECONDS + 60))
  mapfile -t pids < <(abandoned "$1")
  if [[ ${#pids[@]} -eq 0 ]]; then return; fi
  echo "asking what an earlier $1 has left (${pids[*]}) to stop and save"
  kill -TERM "${pids[@]}" 2>/dev/null || true
  while [[ -n "$(abandoned "$1")" && $SECONDS -lt $deadline ]]; do sleep 0.3; done
}
