// SPDX-License-Identifier: Apache-2.0

// Command etcd is etcd's server, of a version that kubeadm knows; Debian's is older.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
