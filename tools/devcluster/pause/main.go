// SPDX-License-Identifier: Apache-2.0

// Command pause holds namespaces open and does nothing else: it is the first process of every pod and of the local node itself.
// As a pid namespace's first process it must collect the children that are left to it; when it ends, the kernel ends all the others.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 {
				break
			}
		}
	}
}
