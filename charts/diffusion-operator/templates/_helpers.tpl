{{/* The prefix of every object's name; 50 characters leave room for what is put behind it. */}}
{{- define "diffusion-operator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names outside the release's namespace carry it: two releases of one name must not meet there. */}}
{{- define "diffusion-operator.globalname" -}}
{{- printf "%s-%s" (include "diffusion-operator.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "diffusion-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "diffusion-operator.labels" -}}
{{ include "diffusion-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: diffusion-operator
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "diffusion-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "diffusion-operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name the ServiceAccount to use when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "diffusion-operator.image" -}}
{{- $repository := required "image.repository: name the operator's container image; none is published, build it from Dockerfile.operator" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "diffusion-operator.keySecretName" -}}
{{- default (printf "%s-key" (include "diffusion-operator.fullname" .)) .Values.operatorKey.existingSecret -}}
{{- end -}}

{{/* "true" when every namespace is watched, else empty. */}}
{{- define "diffusion-operator.clusterWide" -}}
{{- if has "*" .Values.watchNamespaces -}}true{{- end -}}
{{- end -}}

{{/* The namespaces to watch, as a JSON list; not asked for when all are. */}}
{{- define "diffusion-operator.namespaces" -}}
{{- default (list .Release.Namespace) .Values.watchNamespaces | toJson -}}
{{- end -}}

{{/* The name of the Lease. Releases in one namespace that watch the same namespaces elect one leader. */}}
{{- define "diffusion-operator.leaseName" -}}
{{- printf "diffusion-operator-%s" (include "diffusion-operator.namespaces" . | fromJsonArray | sortAlpha | join "," | sha256sum | trunc 10) -}}
{{- end -}}

{{/* The restricted profile of Pod Security, with the user and groups of the values. */}}
{{- define "diffusion-operator.podSecurity" -}}
{{- with .Values.podSecurityContext }}
{{- toYaml . }}
{{ end -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "diffusion-operator.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The operator's pods prefer different nodes; affinity of the values goes before. */}}
{{- define "diffusion-operator.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "diffusion-operator.selectorLabels" . | nindent 12 }}
{{- end -}}

{{/* What the operator does, verb by verb; the same in a Role and in a ClusterRole. */}}
{{- define "diffusion-operator.rules" -}}
# Our kinds are only watched: no finalizer and no annotation is ever written to them.
- apiGroups: [diffusion-operator.dev]
  resources: [diffusiondeployments, loraadapters]
  verbs: [list, watch]
- apiGroups: [diffusion-operator.dev]
  resources: [diffusiondeployments/status, loraadapters/status]
  verbs: [patch]
# Children name their owner with blockOwnerDeletion, which takes this right where owner references are checked (OpenShift).
- apiGroups: [diffusion-operator.dev]
  resources: [diffusiondeployments/finalizers]
  verbs: [update]
# One pod a replica. No exec, no log.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, patch, delete]
# Server-side apply, which takes both verbs. What is no longer wanted goes with its owner.
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [list, watch, create, patch]
# Those two a deployment may do without, and they are removed from one that is running.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
# Control tokens are applied blind: no Secret is ever read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
# The Warnings about a pod that waits are read, by its UID.
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
{{- end -}}
