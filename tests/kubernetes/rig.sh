#!/bin/sh
# rig.sh ROOT FOLDER... -- COMMAND... : COMMAND inside the Debian root ROOT, in namespaces of its own (network, processes, mounts): it reaches nothing
# outside, and all that it started ends with it. Each FOLDER is there under its own name. pivot_root, not chroot: a container that is started
# below a chroot would see the machine's files.
set -eu
exec unshare --net --pid --ipc --uts --mount --propagation private --fork --kill-child=KILL sh -c '
set -eu
hostname rig
ip link set lo up; ip link add rig0 type veth peer name rig1; ip addr add 10.77.0.1/24 dev rig0; ip link set rig0 up; ip link set rig1 up
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"; mount --rbind /sys "$root/sys"; mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; shift; done
shift
mkdir -p "$root/.old"; cd "$root"; pivot_root . .old; cd /; umount -l /.old
exec "$@"' sh "$@"
