# shellcheck shell=bash
# What is below the local servers: SQLite and folders, or (DFLASH_LOCAL_POSTGRES, DFLASH_LOCAL_S3) a PostgreSQL and an S3 server of
# their own; and whether they ask for a password (DFLASH_LOCAL_AUTH). Needs common.sh, and `start` and `wait_for` of `up`.
SECRETS="${DFLASH_LOCAL_AUTH:-}${DFLASH_LOCAL_POSTGRES:-}${DFLASH_LOCAL_S3:-}"
POSTGRES_PORT="${DFLASH_POSTGRES_PORT:-5433}" # not 5432: the machine's own cluster is usually there
S3_PORT="${DFLASH_S3_PORT:-8333}"

choose_stores() { # starts what was asked for, and exports what the two servers need to know of it
  export MLFLOW_BACKEND_STORE_URI="${DFLASH_MLFLOW_STORE:-sqlite:///$RUNS/mlflow.db}" MLFLOW_ARTIFACTS_DESTINATION="$RUNS/mlartifacts"
  if [[ -z "$SECRETS" ]]; then return; fi
  DFLASH_PREFECT_PORT="$PREFECT_PORT" DFLASH_MLFLOW_PORT="$MLFLOW_PORT" DFLASH_POSTGRES_PORT="$POSTGRES_PORT" DFLASH_S3_PORT="$S3_PORT" \
    "$ROOT/infra/make-secrets" "$SERVER_ENV" "$CLIENT_ENV"
  if [[ -n "${DFLASH_LOCAL_POSTGRES:-}" ]]; then use_postgres; fi
  if [[ -n "${DFLASH_LOCAL_S3:-}" ]]; then use_s3; fi
  if [[ -n "${DFLASH_LOCAL_AUTH:-}" ]]; then use_auth; fi
}

become_client() { # forgets what only servers may know, and exports what workers need
  unset PREFECT_SERVER_DATABASE_CONNECTION_URL PREFECT_SERVER_API_AUTH_STRING MLFLOW_BACKEND_STORE_URI MLFLOW_ARTIFACTS_DESTINATION \
    MLFLOW_AUTH_DATABASE_URI MLFLOW_AUTH_ADMIN_USERNAME MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY
  if [[ -z "$SECRETS" ]]; then return; fi
  # Curves go through MLflow's server: its database is not the runs folder's any more, or not for everybody.
  export_from "$CLIENT_ENV" MLFLOW_TRACKING_URI MLFLOW_TRACKING_USERNAME MLFLOW_TRACKING_PASSWORD PREFECT_API_AUTH_STRING
}

export_from() { # export_from FILE NAME...: these variables of an environment file, and no others
  local file="$1" name line
  shift
  for name in "$@"; do
    line="$(grep -m 1 "^$name=" "$file")"
    export "${line?}"
  done
}

use_auth() {
  export_from "$SERVER_ENV" PREFECT_SERVER_API_AUTH_STRING MLFLOW_AUTH_ADMIN_USERNAME MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY
  if [[ -n "${DFLASH_LOCAL_POSTGRES:-}" ]]; then
    export_from "$SERVER_ENV" MLFLOW_AUTH_DATABASE_URI
  else
    export MLFLOW_AUTH_DATABASE_URI="sqlite:///$STATE/mlflow-accounts.db"
  fi
}

use_postgres() { # a cluster in $STATE/postgres; PostgreSQL refuses to run as root, so root runs it as the user postgres
  local binaries data="$STATE/postgres" as=() password_file="$STATE/postgres.password"
  binaries="$(postgres_binaries)" || { echo "PostgreSQL is not installed (Debian: apt-get install postgresql)" >&2; exit 1; }
  mkdir -p "$data"
  if [[ $EUID -eq 0 ]]; then
    chown postgres: "$data"
    as=(setpriv --reuid=postgres --regid=postgres --init-groups)
    "${as[@]}" test -x "$data" || { echo "the user postgres cannot reach $data: choose another DFLASH_LOCAL_DIR" >&2; exit 1; }
  fi
  export_from "$SERVER_ENV" POSTGRES_PASSWORD PREFECT_DB_PASSWORD MLFLOW_DB_PASSWORD
  if [[ ! -f "$data/PG_VERSION" ]]; then
    (umask 077 && echo "$POSTGRES_PASSWORD" >"$password_file")
    if [[ $EUID -eq 0 ]]; then chown postgres: "$password_file"; fi
    (cd "$data" && "${as[@]}" "$binaries/initdb" --pgdata "$data" --username postgres --auth scram-sha-256 --encoding UTF8 \
      --data-checksums --pwfile "$password_file" >>"$STATE/logs/postgres.log" 2>&1)
    rm "$password_file"
  fi
  start postgres "${as[@]}" "$binaries/postgres" -D "$data" -p "$POSTGRES_PORT" -c listen_addresses=127.0.0.1 -k "$data"
  wait_for postgres "$binaries/pg_isready" --quiet --host 127.0.0.1 --port "$POSTGRES_PORT"
  PGHOST=127.0.0.1 PGPORT="$POSTGRES_PORT" PGUSER=postgres PGPASSWORD="$POSTGRES_PASSWORD" PATH="$binaries:$PATH" \
    "$ROOT/infra/services/create-databases"
  unset POSTGRES_PASSWORD PREFECT_DB_PASSWORD MLFLOW_DB_PASSWORD # workers have no business in the databases
  export_from "$SERVER_ENV" PREFECT_SERVER_DATABASE_CONNECTION_URL MLFLOW_BACKEND_STORE_URI
}

postgres_binaries() { # folder of initdb and postgres, the newest version's
  local found
  found="$(find /usr/lib/postgresql -mindepth 3 -maxdepth 3 -path '*/bin/initdb' 2>/dev/null | sort --version-sort | tail -n 1)"
  if [[ -z "$found" ]]; then found="$(command -v initdb)"; fi
  if [[ -n "$found" ]]; then dirname "$(readlink -f "$found")"; else return 1; fi
}

use_s3() { # moto's server: it keeps everything in memory and takes any key, so it is for trials and tests alone
  start s3 "$BIN/moto_server" --host 127.0.0.1 --port "$S3_PORT"
  wait_for s3 answers "http://127.0.0.1:$S3_PORT/moto-api/"
  export_from "$SERVER_ENV" MLFLOW_ARTIFACTS_DESTINATION MLFLOW_S3_ENDPOINT_URL
  export_from "$CLIENT_ENV" AWS_ENDPOINT_URL AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_DEFAULT_REGION
  local artifacts runs
  artifacts="$(sed -n 's/^DFLASH_ARTIFACTS_BUCKET=//p' "$SERVER_ENV")" runs="$(sed -n 's/^DFLASH_RUNS_BUCKET=//p' "$SERVER_ENV")"
  "$BIN/python" "$ROOT/infra/services/make_buckets.py" "$artifacts" "$runs"
}
