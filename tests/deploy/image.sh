#!/usr/bin/env bash
# Builds the image of deploy/docker on a bare Debian, and starts it as Kubernetes would. For a
# person, as root, on Debian with buildah and debootstrap; nothing is fetched from a registry of
# images:
#
#   tests/deploy/image.sh BINARY
#
#   DEBIAN_ROOT   a folder made by debootstrap --variant=minbase, to begin with; made anew if unset
set -euo pipefail
berth=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

temp=$(mktemp -d)
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs CONTAINERS_STORAGE_CONF=$temp/storage.conf
printf '[storage]\ndriver = "vfs"\nrunroot = "%s"\ngraphroot = "%s"\n' "$temp/run" "$temp/graph" \
    >"$CONTAINERS_STORAGE_CONF"
pid=
end() {
    [[ -z $pid ]] || kill -KILL "$pid" 2>/dev/null || true
    buildah umount --all >/dev/null 2>&1 || true
    rm -rf --one-file-system "$temp"
}
trap end EXIT

root=${DEBIAN_ROOT:-$temp/root}
[[ -d $root ]] || debootstrap --variant=minbase bookworm "$root" >/dev/null

# The two base images, under names that the Dockerfile is given. The builder's cargo puts the
# binary where a build would, and wants to be called as CI calls it.
container=$(buildah from scratch)
at=$(buildah mount "$container")
cp -a "$root/." "$at/"
buildah commit --quiet "$container" localhost/runtime:bookworm >/dev/null
mkdir "$at/prebuilt"
cp "$berth" "$at/prebuilt/berth"
cat >"$at/usr/local/bin/cargo" <<'CARGO'
#!/bin/sh -e
[ "$*" = "build --release --locked" ]
[ -f Cargo.lock ] && [ -f build.rs ] && [ -d proto ] && [ -d src ] && [ ! -e tests ]
mkdir -p target/release
cp /prebuilt/berth target/release/berth
CARGO
chmod +x "$at/usr/local/bin/cargo"
buildah commit --quiet "$container" localhost/builder:bookworm >/dev/null

buildah build --quiet --pull=never --build-arg BUILDER=localhost/builder:bookworm \
    --build-arg RUNTIME=localhost/runtime:bookworm \
    -f deploy/docker/Dockerfile -t localhost/berth:try . >/dev/null
echo "built"
says='{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}'
[[ $(buildah inspect --type image --format "$says" localhost/berth:try) == \
    '65532:65532 [berth] [serve]' ]]

# As in deploy/kubernetes: a volume of root's that the group may write to, a read-only root, no
# capabilities, the variables of a Service of this name.
image=$(buildah mount "$(buildah from --pull=never localhost/berth:try)")
[[ $(stat -c '%u %a' "$image/var/lib/berth") == '65532 700' ]]
chroot "$image" /bin/sh -c 'flock --no-fork /tmp/lock true && command -v kill' >/dev/null
install -d -g 65532 -m 2775 "$temp/volume"
cat >"$temp/start.py" <<'PYTHON'
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.chroot(sys.argv[1])
os.chdir("/var/lib/berth")
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.setgroups([65532]), os.setgid(65532), os.setuid(65532)
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
variables = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "BERTH_DATA_DIR": "/var/lib/berth/store",
    "BERTH_PORT": "tcp://10.0.0.1:7700",
    "BERTH_SERVICE_HOST": "10.0.0.1",
}
os.execvpe("berth", ["berth", *sys.argv[2:]], variables)
PYTHON
free() {
    python3 -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'
}
grpc=$(free) admin=$(free)
# The first process of a namespace, as in a container: what it does not handle it does not get.
unshare --mount --pid --fork --kill-child --propagation private sh -ec '
    image=$1 volume=$2 start=$3
    shift 3
    mount --bind "$image" "$image"
    mount -o remount,ro,bind "$image"
    mount --bind "$volume" "$image/var/lib/berth"
    mount -t proc proc "$image/proc"
    exec python3 "$start" "$image" "$@"
' sh "$image" "$temp/volume" "$temp/start.py" \
    serve --listen "127.0.0.1:$grpc" --admin-listen "127.0.0.1:$admin" >"$temp/log" 2>&1 &
pid=$!
for _ in $(seq 100); do
    curl -fs "http://127.0.0.1:$admin/readyz" >/dev/null && break
    sleep 0.1
done
curl -fsS "http://127.0.0.1:$admin/readyz" || { cat "$temp/log"; exit 1; }
"$berth" replicas --url "http://127.0.0.1:$grpc"
[[ $(stat -c '%u %a' "$temp/volume/store") == '65532 2700' ]]
inner=$(pgrep -P "$pid")
grep -q '^CapBnd:.*0000000000000000$' "/proc/$inner/status"
kill -TERM "$inner"
wait "$pid"
pid=
cat "$temp/log"
echo "started, answered and drained: all well"
