#!/bin/sh
# Takes back the last change of an installation: rollback.sh [NAMESPACE]. For another than the last, apply its overlay.
#
# Worker, gateway, then the nodes of each pool, so that no caller asks for what the old nodes do not know. Each must be
# ready before the next. A Deployment that has not changed since it was made is left as it is. A LeaderWorkerSet has no
# history that kubectl could take back: the script names it, and its old overlay must be applied.
set -eu

namespace=${1:-penstock}
kube() { kubectl --namespace "$namespace" "$@"; }

for part in worker gateway node; do
    for deployment in $(kube get deployments --selector "app.kubernetes.io/component=$part" --output name); do
        if [ "$(kube rollout history "$deployment" | grep -c '^[0-9]')" -lt 2 ]; then
            echo "$deployment has one revision; it stays"
            continue
        fi
        kube rollout undo "$deployment"
        kube rollout status "$deployment" --timeout 40m
    done
done
groups=$(kube get leaderworkersets.leaderworkerset.x-k8s.io --output name 2>/dev/null || true)
if [ -n "$groups" ]; then
    echo "rollback: apply the overlay of the old release for: $groups" >&2
    exit 1
fi
