{{/* Names, labels and addresses that several templates need. */}}

{{- define "shoal.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* A release may have dots in its name, a service may not. */}}
{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects pods of a component: dict "root" . "component" NAME */}}
{{- define "shoal.selector" -}}
app.kubernetes.io/name: {{ include "shoal.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "shoal.labels" -}}
{{ include "shoal.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: shoal
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Pods that a launcher starts have this label, whichever job they are of. */}}
{{- define "shoal.workerPods" -}}
matchExpressions:
  - {key: shoal.dev/worker, operator: Exists}
{{- end -}}

{{- define "shoal.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "shoal.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* dict "root" . "image" IMAGE. A registry of all images takes the place of the image's own. */}}
{{- define "shoal.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{- $repository := .image.repository -}}
{{- with dig "imageRegistry" "" (.root.Values.global | default dict) -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $repository "") -}}
{{- end -}}
{{- printf "%s%s%s" $repository (hasPrefix "sha256:" $tag | ternary "@" ":") $tag -}}
{{- end -}}

{{- define "shoal.tokenSecret" -}}
{{- .Values.token.existingSecret | default (printf "%s-token" (include "shoal.fullname" .)) -}}
{{- end -}}

{{- define "shoal.viewTokenSecret" -}}
{{- .Values.monitoring.serviceMonitor.tokenSecret | default (printf "%s-view-token" (include "shoal.fullname" .)) -}}
{{- end -}}

{{- define "shoal.tlsSecret" -}}
{{- .Values.tls.secret | default (printf "%s-tls" (include "shoal.fullname" .)) -}}
{{- end -}}

{{- define "shoal.ownEtcd" -}}
{{- if and (eq .Values.store "etcd") (not .Values.etcd.external.endpoints) -}}true{{- end -}}
{{- end -}}

{{- define "shoal.ownEtcdTls" -}}
{{- if and (include "shoal.ownEtcd" .) (has .Values.tls.source (list "generated" "certManager")) -}}true{{- end -}}
{{- end -}}

{{- define "shoal.scheme" -}}
{{- eq .Values.tls.source "none" | ternary "http" "https" -}}
{{- end -}}

{{- define "shoal.url" -}}
{{- printf "%s://%s.%s.svc:%d" (include "shoal.scheme" .) (include "shoal.fullname" .) .Release.Namespace (int .Values.service.port) -}}
{{- end -}}

{{- define "shoal.etcdHosts" -}}
{{- $name := printf "%s-etcd" (include "shoal.fullname" .) -}}
{{- $hosts := list -}}
{{- range $number := until (int .Values.etcd.replicas) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s.%s.svc" $name $number $name $.Release.Namespace) -}}
{{- end -}}
{{- join "," $hosts -}}
{{- end -}}

{{- define "shoal.store" -}}
{{- $external := .Values.etcd.external -}}
{{- if eq .Values.store "embedded" -}}
embedded:/data/store
{{- else if $external.endpoints -}}
etcd://{{ with $external.user }}{{ . }}@{{ end }}{{ join "," $external.endpoints }}{{ $external.prefix }}
{{- else -}}
etcd://{{ include "shoal.etcdHosts" . | replace "," ":2379," }}:2379{{ $external.prefix }}
{{- end -}}
{{- end -}}

{{/* The names that the controllers' certificate must have, separated by commas. A controller is reached by the others
     as A-B-C-D.SERVICE, the name that the cluster's DNS gives to a pod of a headless service. */}}
{{- define "shoal.certificateNames" -}}
{{- $names := list "localhost" -}}
{{- range $service := list (include "shoal.fullname" .) (printf "%s-workers" (include "shoal.fullname" .)) -}}
{{- $host := printf "%s.%s.svc" $service $.Release.Namespace -}}
{{- $names = concat $names (list $service (printf "%s.%s" $service $.Release.Namespace) $host (printf "%s.%s" $host $.Values.clusterDomain)) -}}
{{- end -}}
{{- $peers := printf "*.%s-workers.%s.svc" (include "shoal.fullname" .) .Release.Namespace -}}
{{- join "," (concat $names (list $peers (printf "%s.%s" $peers .Values.clusterDomain))) -}}
{{- end -}}

{{/* The same for etcd: every member by its name, because etcd looks up who connects. */}}
{{- define "shoal.etcdCertificateNames" -}}
{{- $hosts := splitList "," (include "shoal.etcdHosts" .) -}}
{{- $names := concat (list "localhost") $hosts -}}
{{- range $hosts -}}
{{- $names = append $names (printf "%s.%s" . $.Values.clusterDomain) -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}
