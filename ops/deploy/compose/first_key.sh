#!/bin/sh
# first_key.sh FOLDER PROMETHEUS: makes the first API key, and one for Prometheus, each once, in these folders. It runs as
# the admin of Redis, because no other service may make keys.
set -eu
keys=$1 of_prometheus=$2
umask 077
make_key() {  # FILE TENANT SCOPE…
    file=$1 tenant=$2
    shift 2
    test -s "$file" && return
    for scope; do set -- "$@" --scope "$scope"; shift; done
    penstock keys add "$tenant" "$@" > "$file.new"
    mv "$file.new" "$file"
}
make_key "$keys/first-key" default infer metrics admin
make_key "$keys/metrics-key" prometheus metrics
# Prometheus has another user than this service, and its volume holds nothing else.
install -m 444 "$keys/metrics-key" "$of_prometheus/penstock.key"
echo "the first API key: docker compose run --rm --no-deps admin cat /keys/first-key"
