#!/bin/sh
# Makes a build stage use this site's certificates and mirrors. Run at the stage's start, and again once ca-certificates is installed.
set -eu

if [ -e /site/certificates.pem ]; then
    # pip takes one file: the site's certificates and the system's.
    cat /site/certificates.pem /etc/ssl/certs/ca-certificates.crt >/site/ca.pem 2>/dev/null || cp /site/certificates.pem /site/ca.pem
    echo 'Acquire::https::CAInfo "/site/ca.pem";' >/etc/apt/apt.conf.d/99site
fi
if [ -e /site/apt-mirror ]; then
    # shellcheck source=/dev/null
    . /etc/os-release
    IFS= read -r mirror </site/apt-mirror
    [ "$ID" = ubuntu ] && components='main universe' || components=main
    rm -f /etc/apt/sources.list.d/*
    for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-updates"; do
        printf 'deb %s %s %s\n' "$mirror" "$suite" "$components"
    done >/etc/apt/sources.list
    if [ -e /site/apt-security-mirror ]; then
        IFS= read -r mirror </site/apt-security-mirror
        printf 'deb %s %s %s\n' "$mirror" "$VERSION_CODENAME-security" "$components" >>/etc/apt/sources.list
    fi
    # A dated snapshot keeps the lists of its day, which have expired since.
    echo 'Acquire::Check-Valid-Until "false";' >>/etc/apt/apt.conf.d/99site
fi
