#!/bin/sh
# Switches this machine to another installed release, forwards or back: switch_release.sh /opt/penstock-0.1.0
#
# /opt/penstock is a link to the environment of one release. The link is changed first; then each unit that runs or failed is
# restarted, and must become ready before the next. Forwards: nodes, gateway, worker. Back: worker, gateway, nodes, so that no caller
# asks for what the old nodes do not know. A gateway that runs is reloaded instead, which cuts no stream; within
# PENSTOCK_RELOAD_S (120) seconds it must say that it serves from the new environment. It stops at the first unit that does
# not start; run it again with the old environment to go back. Run it on one machine after the other.
set -eu

link=${PENSTOCK_LINK:-/opt/penstock}
new=${1:?usage: switch_release.sh /opt/penstock-VERSION}
test -L "$link" || { echo "switch_release: $link is no link to the environment of a release" >&2; exit 2; }
test -x "$new/bin/penstock" || { echo "switch_release: $new has no bin/penstock" >&2; exit 2; }
version_of() { "$1/bin/penstock" --version | sed 's/.* //'; }
from=$(version_of "$link")
to=$(version_of "$new")

units() { systemctl list-units --plain --no-legend --state=active,activating,failed "$@" | sed 's/ .*//'; }
nodes=$(units 'penstock-node@*.service' 'penstock-gpu-node@*.service')
gateway=$(units penstock-gateway.service)
worker=$(units penstock-worker.service)
if [ "$from" != "$to" ] && [ "$(printf '%s\n%s\n' "$from" "$to" | sort -V | tail -n 1)" = "$from" ]; then
    order="$worker $gateway $nodes"
else
    order="$nodes $gateway $worker"
fi

echo "from $from ($(readlink -f "$link")) to $to ($new)"
ln -s "$new" "$link.next"
mv -T "$link.next" "$link"
# The keeper of a gateway says where its release is.
serves_from() {
    waited=0
    until systemctl show --property=StatusText --value "$1" | grep -q -e " from $2\$"; do
        waited=$((waited + 1))
        [ "$waited" -le "${PENSTOCK_RELOAD_S:-120}" ] || return 1
        sleep 1
    done
}

switch() {
    if [ "$1" = "$gateway" ] && systemctl is-active --quiet "$1"; then
        systemctl reload "$1" && serves_from "$1" "$(readlink -f "$new")"
    else
        systemctl restart "$1"
    fi
}

for unit in $order; do
    switch "$unit" || { echo "switch_release: $unit does not start: journalctl -u $unit" >&2; exit 1; }
    echo "$unit is ready"
done
