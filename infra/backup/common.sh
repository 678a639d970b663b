# shellcheck shell=bash disable=SC2034
# Shared by backup and restore: the databases, and how each is reached as its owner.
DATABASES=(prefect mlflow mlflow_auth)
export PGHOST="${DFLASH_DB_HOST:-127.0.0.1}" PGPORT="${DFLASH_POSTGRES_PORT:-5432}" PGCONNECT_TIMEOUT=10

as_owner() { # as_owner DATABASE COMMAND...: the command with PGUSER, PGPASSWORD and PGDATABASE of the database's owner
  local database="$1" role password
  shift
  case "$database" in
    prefect) role=prefect password="${PREFECT_DB_PASSWORD:?load the environment file that infra/make-secrets wrote}" ;;
    mlflow | mlflow_auth) role=mlflow password="${MLFLOW_DB_PASSWORD:?load the environment file that infra/make-secrets wrote}" ;;
    *) echo "no database $database; there are ${DATABASES[*]}" >&2; return 2 ;;
  esac
  PGUSER="$role" PGPASSWORD="$password" PGDATABASE="$database" "$@"
}
