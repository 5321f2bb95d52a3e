// A real Kubernetes control plane in one binary, for tests: etcd, apiserver, controller-manager or scheduler, as the
// first argument says. Nothing here is ours but this choice; there is no kubelet in it.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

func main() {
	if len(os.Args) < 2 {
		fail("which part: etcd, apiserver, controller-manager or scheduler?")
	}
	part, flags := os.Args[1], os.Args[2:]
	// One part a process: each registers feature gates that are global, and a second one would find them taken.
	switch part {
	case "etcd":
		etcdmain.Main(os.Args[1:])
	case "apiserver":
		run(apiserver.NewAPIServerCommand(), flags)
	case "controller-manager":
		run(controllermanager.NewControllerManagerCommand(), flags)
	case "scheduler":
		run(scheduler.NewSchedulerCommand(), flags)
	default:
		fail("there is no part " + part)
	}
}

func run(command *cobra.Command, flags []string) {
	command.SetArgs(flags)
	os.Exit(cli.Run(command))
}

func fail(sentence string) {
	fmt.Fprintln(os.Stderr, "control plane for tests:", sentence)
	os.Exit(2)
}
