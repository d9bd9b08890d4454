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

{{/* The store without what may change: the members of an etcd that is somebody's own. */}}
{{- define "shoal.storeName" -}}
{{- if eq .Values.store "embedded" -}}
an embedded store
{{- else if .Values.etcd.external.endpoints -}}
an etcd of your own under {{ .Values.etcd.external.prefix }}
{{- else -}}
the chart's etcd under {{ .Values.etcd.external.prefix }}
{{- end -}}
{{- end -}}

{{/* What an upgrade cannot change: the jobs are in the store, and nothing carries them into another one. */}}
{{- define "shoal.kept" -}}
store: {{ include "shoal.storeName" . | quote }}
{{- if include "shoal.ownEtcd" . }}
members: {{ .Values.etcd.replicas | quote }}
volume-size: {{ include "shoal.bytes" .Values.etcd.volume.size | quote }}
storage-class: {{ .Values.etcd.volume.storageClass | default "of the cluster" | quote }}
addresses: {{ ternary "with" "without" (not (empty (include "shoal.ownEtcdTls" .))) }}
{{- end }}
{{- end -}}

{{/* The same as annotations of what has it. */}}
{{- define "shoal.keptAnnotations" -}}
{{- $found := dict -}}
{{- range $key, $value := include "shoal.kept" . | fromYaml -}}
{{- $found = set $found (printf "kept.shoal.dev/%s" $key) $value -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* A quantity as one number: an API server writes 8192Mi as 8Gi. */}}
{{- define "shoal.bytes" -}}
{{- $scales := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- $number := regexFind "^[0-9.]+" (toString .) -}}
{{- printf "%.0f" (mulf (float64 $number) (get $scales (trimPrefix $number (toString .)) | default 1.0)) -}}
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
