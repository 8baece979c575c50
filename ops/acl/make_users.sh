#!/bin/sh
# Makes the users of Redis 7 or Valkey, each with a password of its own: make_users.sh /etc/penstock/secrets 127.0.0.1:6379 > users.acl
#
# The ACL file goes to stdout, and the URL of each user to FOLDER/USER_url, which only its owner may read. Nothing is made if one of
# them exists. `operator` may do everything: it is for redis-cli, and no process of penstock needs it.
set -euC
umask 077

usage='usage: make_users.sh FOLDER HOST:PORT > users.acl'
folder=${1:?$usage}
address=${2:?$usage}
here=$(dirname "$0")

for user in gateway node worker admin subscriber operator; do
    test ! -e "$folder/${user}_url" || { echo "make_users: $folder/${user}_url exists" >&2; exit 1; }
done
cat "$here/default.acl" "$here/health.acl"
for user in gateway node worker admin subscriber operator; do
    password=$(od -An -v -tx1 -N24 /dev/urandom | tr -d ' \n')
    echo "redis://$user:$password@$address/0" > "$folder/${user}_url"
    case $user in
        operator) rules='user operator on >@OPERATOR_PASSWORD@ ~* &* +@all' ;;
        node | admin | subscriber) rules=$(cat "$here/$user.acl") ;;
        # They only read the list of pools and the API keys.
        *) rules=$(sed 's/ ~penstock:\(pools\|keys\)/ %R~penstock:\1/g' "$here/$user.acl") ;;
    esac
    echo "${rules%%@*}$password${rules#*_PASSWORD@}"
done
