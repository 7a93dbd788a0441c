#!/usr/bin/env bash
# Boots a Debian in systemd-nspawn and runs the units of deploy/systemd there, as deploy/README.md
# says, with a simulated engine. For a person, as root, on Debian with debootstrap and
# systemd-container:
#
#   tests/deploy/systemd.sh BINARY
#
#   DEBIAN_ROOT   a folder made by debootstrap --variant=minbase, to begin with; made anew if unset
set -euo pipefail
berth=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/../../deploy/systemd"

temp=$(mktemp -d)
trap 'rm -rf --one-file-system "$temp"' EXIT
root=$temp/root
if [[ -n ${DEBIAN_ROOT:-} ]]; then
    cp -a "$DEBIAN_ROOT" "$root"
else
    debootstrap --variant=minbase bookworm "$root" >/dev/null
fi
cp /etc/resolv.conf "$root/etc/"
DEBIAN_FRONTEND=noninteractive chroot "$root" sh -c 'apt-get update -qq &&
    apt-get install -y -qq --no-install-recommends systemd systemd-sysv' >"$temp/apt.log" 2>&1

install "$berth" "$root/usr/local/bin/berth"
install -m 0644 berth.service berth-sidecar@.service "$root/etc/systemd/system/"
install -D -m 0644 berth.sysusers "$root/usr/lib/sysusers.d/berth.conf"
install -d "$root/etc/berth/sidecar"
install -m 0644 berth.toml "$root/etc/berth/"
# The engine is on this machine, which has to be said where it is not Berth's own loopback.
echo 'engine-networks = "127.0.0.0/8"' >>"$root/etc/berth/berth.toml"
sed 's/berth.example.internal/127.0.0.1/' sidecar.env >"$root/etc/berth/sidecar/0.env"

cat >"$root/etc/systemd/system/engine@.service" <<'UNIT'
[Service]
ExecStart=/usr/local/bin/berth sim-engine --port 3000%i
UNIT
cat >"$root/etc/systemd/system/try.service" <<'UNIT'
[Service]
Type=oneshot
ExecStart=/srv/try
ExecStopPost=/bin/systemctl --force --force poweroff
[Install]
WantedBy=multi-user.target
UNIT
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../try.service "$root/etc/systemd/system/multi-user.target.wants/"

cat >"$root/srv/try" <<'TRY'
#!/bin/bash
exec >/srv/log 2>&1
set -euo pipefail
trap 'echo "FAILED at line $LINENO"; journalctl --no-pager -n 60' ERR
eventually() { for _ in $(seq 100); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done; "$@"; }
replica() { berth replicas --token-file /srv/ops | grep -q "^$1 .* $2 "; }
pid() { systemctl show -p MainPID --value "$1"; }

systemd-sysusers
cd /etc/berth
berth token --principal sidecars --role replica --out sidecar.token >credentials
berth token --principal ops --role admin --out /srv/ops >>credentials
chown root:berth credentials sidecar.token
chmod 0640 credentials sidecar.token

systemctl start berth
eventually berth stats --token-file /srv/ops
[[ $(stat -c '%U %a' /var/lib/berth /var/lib/berth/store) == $'berth 700\nberth 700' ]]
grep -q '^CapEff:.*0000000000000000$' "/proc/$(pid berth)/status"
grep -q '^NoNewPrivs:.*1$' "/proc/$(pid berth)/status"
grep -q '^Seccomp:.*2$' "/proc/$(pid berth)/status"
echo "started: its own user, no capabilities, filtered"

systemctl start engine@0 berth-sidecar@0
name=$(cat /proc/sys/kernel/hostname)-0
eventually replica "$name" healthy
echo "registered: $name"

berth token --principal late --role admin --out /srv/late >>credentials
eventually berth stats --token-file /srv/late
echo "a token was exchanged without a restart"

mv /var/log/berth/audit.jsonl /var/log/berth/audit.1
systemctl reload berth
eventually test -e /var/log/berth/audit.jsonl
echo "reloaded: the audit log is opened again"

was=$(pid berth-sidecar@0)
systemctl restart engine@0
eventually replica "$name" healthy
[[ $(pid berth-sidecar@0) != "$was" ]]
grep -q '"event":"deregister"' /var/log/berth/audit.jsonl
echo "an engine was restarted: its sidecar drained first and is back"

kill -KILL "$(pid berth)"
sleep 1
eventually replica "$name" healthy
echo "a crash: started again, and has its replica"

systemctl stop engine@0
[[ $(systemctl is-active berth-sidecar@0) == inactive ]]
replica "$name" dead
systemctl stop berth
for unit in berth berth-sidecar@0; do
    [[ $(systemctl show -p Result --value $unit) == success ]]
done
echo "stopped: all well"
TRY
chmod +x "$root/srv/try"

timeout 150 systemd-nspawn -D "$root" --boot --register=no --keep-unit --private-network \
    --console=pipe </dev/null >"$temp/boot.log" 2>&1 || true
cat "$root/srv/log"
grep -qx 'stopped: all well' "$root/srv/log"
